"""What a group will take on the device: a part that is there once, a part for each member, and what checking its first step takes.

By arithmetic (weights, gradients, optimizer state, what one step saves for its backward pass), or measured by the adapter where
memory is scarce enough that it matters. Every distinct data array counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.planning.spec import ModelSpec

CHECKED_BYTES = 64 << 20  # copies that are made at a time to check a first step; of one member at least


@dataclass(frozen=True)
class Footprint:
    """What a stack takes, measured: once, for each member, and for each member that is being checked."""

    fixed_bytes: int
    member_bytes: int
    checked_bytes: int = 0


@dataclass(frozen=True)
class Estimate:
    """`fixed_bytes + member_bytes * members + check_bytes`."""

    fixed_bytes: int
    member_bytes: int
    members: int
    check_bytes: int = 0
    measured: bool = False
    checked_bytes: int = 0
    """Of `check_bytes`, what each member adds as long as they are few."""

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.member_bytes * self.members + self.check_bytes


def estimate(specs: Sequence[ModelSpec], footprint: Footprint | None = None) -> Estimate:
    """The estimate for specs of one structure."""
    count = len(specs)
    if footprint is not None:
        member = footprint.checked_bytes
        checked = max(member, min(CHECKED_BYTES, member * count))
        return Estimate(footprint.fixed_bytes, footprint.member_bytes, count, checked, True, member)
    arrays = {key: size for spec in specs for key, size in spec.data}
    largest = max(spec.state_bytes + spec.step_bytes for spec in specs)
    return Estimate(sum(arrays.values()), largest, count)
