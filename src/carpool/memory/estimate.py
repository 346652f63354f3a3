"""What a group will take on the device: a fixed part plus a part for each member, by arithmetic.

Measured estimates are not here yet; the arithmetic counts weights, gradients, optimizer state, the tensors one step
saves, and every distinct data array once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.planning.spec import ModelSpec


@dataclass(frozen=True)
class Estimate:
    """`fixed_bytes + member_bytes * members`."""

    fixed_bytes: int
    member_bytes: int
    members: int

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.member_bytes * self.members


def estimate(specs: Sequence[ModelSpec]) -> Estimate:
    """The estimate for specs of one structure: shared data counts once."""
    arrays = {key: size for spec in specs for key, size in spec.data}
    largest = max(spec.state_bytes + spec.step_bytes for spec in specs)
    return Estimate(sum(arrays.values()), largest, len(specs))
