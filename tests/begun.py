"""What of a run had begun, by the events that its reporters heard."""

from collections.abc import Iterable

from carpool.events import PreparationBegan


def assert_nothing_ran(events: Iterable[object]) -> None:
    """A run that was refused may have said what it prepared; nothing of its work had begun."""
    assert not [event for event in events if not isinstance(event, PreparationBegan)]
