"""A fused step beside its members' steps alone: whether what is between them is rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from carpool.adapters.base import Check
from carpool.adapters.torch import precision
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.check import Alone
from carpool.adapters.torch.differences import Alones, Differences, Together, alike
from carpool.adapters.torch.stacked import Recipe


@dataclass(frozen=True)
class Tolerance:
    """How far apart two orders of summation may end up in one step.

    `weight` is relative to the leaf's largest weight. `noise` is relative to the largest gradient: below it an Adam
    step is the sign of a rounding error, so such elements are not compared.
    """

    weight: float
    noise: float


_FULL = Tolerance(1e-4, 1e-5)  # of single precision
_AGAIN = 3  # times what a member's own rounding makes of it: that of two steps, and no two are alike


def tolerance(
    dtype: torch.dtype,
    device: torch.device,
    convolves: bool,
    recurs: bool = False,
    lowered: bool = False,
) -> Tolerance:
    """The tolerance for a type, given the precision that the user's settings leave to matrix products.

    `lowered` says that autocast computes in 16 bits; it leaves float64 alone.
    """
    if dtype == torch.float64:
        return Tolerance(1e-9, 1e-12)
    loose = lowered or dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda":
        loose |= precision.multiplies_in_tf32() or (convolves and precision.convolves_in_tf32())
        loose |= recurs and precision.recurs_in_tf32()
    return Tolerance(1e-2, 5e-2) if loose else _FULL


def compare(
    recipe: Recipe,
    size: int,
    alone: Mapping[int, Alone],
    together: Mapping[str, Tensor],
    members: Mapping[int, Built],
    strict: Callable[[int], Alone],
) -> Check:
    """The largest difference, and the first member beyond the tolerance, in words.

    Where the precision is low, and deep networks amplify what it rounds off, a member may differ from itself by more than the tolerance.
    So who is beyond it there is computed once more alone, by `strict`, in full precision: as far as that is from the member alone, the
    fused step may be too, and as far again for its own rounding.
    """
    device = together["weights"].device
    allowed, loose = _allowed(recipe, device, members)
    worst, beyond = 0.0, {}
    for rows in alike(recipe, alone):
        own = Alones([alone[row] for row in rows], device)
        sound = own.sound(allowed.noise)
        found = Differences.between(recipe, Together(recipe, size, rows, together), own, sound)
        worst = max(worst, found.largest)
        for place, row in enumerate(rows):
            reach = np.full(len(found.places), allowed.weight)
            if loose and found.words(place, reach) is not None:
                itself = Alones([strict(row)], device)
                counts = {name: mask[place : place + 1] for name, mask in sound.items()}
                noise = Differences.between(recipe, own.only(place), itself, counts)
                rounded = noise.by_kind()[:, 0]  # what is endless is no rounding
                reach = np.maximum(reach, _AGAIN * np.where(np.isfinite(rounded), rounded, 0.0))
            if (words := found.words(place, reach)) is not None:
                beyond[row] = words
    first = next((row for row in alone if row in beyond), None)
    if first is None:
        return Check(len(alone), worst, None)
    name = members[first].job.name
    return Check(
        len(alone), worst, f"the fused step of {name!r} differs from its step alone at {beyond[first]}"
    )


def _allowed(recipe: Recipe, device: torch.device, members: Mapping[int, Built]) -> tuple[Tolerance, bool]:
    """The tolerance, and whether it is the one of a low precision that full precision is beyond."""
    convolves = any(len(leaf.shape) > 2 for leaf in recipe.layout.leaves)
    recurs = any(isinstance(module, nn.RNNBase) for module in recipe.training.modules())
    lowered = any(precision.computes_in_16_bits(b.job.precision, device.type) for b in members.values())
    dtype = recipe.layout.dtype
    found = tolerance(dtype, device, convolves, recurs, lowered)
    return found, dtype == torch.float32 and found != _FULL
