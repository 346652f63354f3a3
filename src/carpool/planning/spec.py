"""What the planner knows of a job: an adapter's description of it, in plain values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from carpool.planning.cursor import Course

Signature = tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True)
class ModelSpec:
    """A job as the planner sees it.

    `signature` covers behaviour, entry by entry, so that two jobs with equal signatures may be stacked and two
    unequal ones can say where they differ. The bytes are what one member holds on the device: weights with their
    optimizer state, and what one step computes; data is counted once per distinct array (`data` names them).
    """

    name: str
    adapter: str
    signature: Signature
    course: Course
    state_bytes: int
    step_bytes: int
    data: tuple[tuple[Hashable, int], ...] = ()
    budget_bytes: int | None = None
    apart: str = ""
    """Why the job needs a process of its own, if it does."""
    busy: str = ""
    """Why one such job leaves the device no room for others, if it does: a stack of them would gain nothing."""
    note: str = ""
    """What else the plan should say of the job, such as what one of its callbacks costs."""

    @property
    def least_bytes(self) -> int:
        """What the job needs whatever its steps compute: its weights with their optimizer state, and its data."""
        return self.state_bytes + sum(size for _, size in self.data)


def difference(a: ModelSpec, b: ModelSpec) -> str | None:
    """The first place where `b`'s behaviour differs from `a`'s, in words; None when there is none."""
    if a.adapter != b.adapter:
        return f"it is a {b.adapter} job, expected a {a.adapter} one"
    ours, theirs = dict(a.signature), dict(b.signature)
    for label, expected in a.signature:
        if label not in theirs:
            return f"it has no {label!r}"
        if theirs[label] != expected:
            return f"{label!r} is {_shown(theirs[label])}, expected {_shown(expected)}"
    extra = next((label for label in theirs if label not in ours), None)
    return None if extra is None else f"it has {extra!r}, which {a.name!r} has not"


def _shown(value: Hashable) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
