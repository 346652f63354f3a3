"""Who holds how much device memory. Pure: every change gives a new ledger. Who waits is the executor's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Ledger:
    """The bytes each holder was promised, out of a capacity.

    >>> ledger, admitted = Ledger(capacity_bytes=100).offer("a", 60)
    >>> admitted, ledger.offer("b", 60)[1], ledger.release("a").free_bytes
    (True, False, 100)
    """

    capacity_bytes: int
    held: Mapping[str, int] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.held_bytes

    def offer(self, holder: str, size_bytes: int) -> tuple[Ledger, bool]:
        """The ledger with the request counted, and whether it was within the capacity."""
        if holder in self.held:
            raise ValueError(
                f"{holder!r} already holds {self.held[holder]} bytes; release it before it asks again"
            )
        if size_bytes > self.free_bytes:
            return self, False
        return replace(self, held={**self.held, holder: size_bytes}), True

    def release(self, holder: str) -> Ledger:
        """The ledger without this holder; releasing one that holds nothing is an error."""
        if holder not in self.held:
            raise ValueError(f"{holder!r} holds nothing; holders are {sorted(self.held)}")
        return replace(self, held={name: size for name, size in self.held.items() if name != holder})
