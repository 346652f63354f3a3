"""Which jobs could run together: equal signatures, in the order the jobs were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carpool.planning.holds import Hold
from carpool.planning.spec import ModelSpec, Signature, difference
from carpool.planning.trials import Trial

Refusal = Callable[[Sequence[ModelSpec]], str | None]
Tried = Callable[[Sequence[ModelSpec]], Trial | None]
Holds = Callable[[Sequence[ModelSpec]], Hold | None]


@dataclass(frozen=True)
class Candidate:
    """Specs of one structure, with what the chooser needs to know about them.

    `refusal` is why they cannot be stacked (None: they can). `stranger` says how they differ from the structure
    most jobs have, for the sentence about a job that is alone with its own. `trial` is what was measured, before or just now.
    """

    specs: tuple[ModelSpec, ...]
    refusal: str | None
    stranger: str | None
    trial: Trial | None = None
    hold: Hold | None = None
    """How much of their step holds Python's lock, where there are other jobs that it would hold up."""

    @property
    def busy(self) -> str:
        """Why one of them leaves the device no room for another, if it does."""
        return self.specs[0].busy


def candidates(specs: Sequence[ModelSpec], refusal: Refusal) -> tuple[Candidate, ...]:
    """The specs by structure. `refusal` is asked once for each structure with more than one job."""
    by_structure: dict[tuple[str, Signature], list[ModelSpec]] = {}
    for spec in specs:
        by_structure.setdefault((spec.adapter, spec.signature), []).append(spec)
    largest = max(by_structure.values(), key=len, default=[])
    return tuple(
        Candidate(
            specs=tuple(members),
            refusal=refusal(members) if len(members) > 1 else None,
            stranger=None
            if members is largest
            else f"differs from {largest[0].name!r}: {difference(largest[0], members[0])}",
        )
        for members in by_structure.values()
    )
