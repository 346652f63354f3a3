"""What an operator raises where a call has no form in a stack."""


class Unstackable(RuntimeError):
    """A call that cannot be run for many members at once; its text is the reason, as the plan shows it."""


class Unkeyed(RuntimeError):
    """An operator drew random numbers that are not keyed by job."""
