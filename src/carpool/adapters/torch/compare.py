"""A fused step beside its members' steps alone: whether what is between them is rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from carpool.adapters.base import Check
from carpool.adapters.torch import noise, precision
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.check import Alone, Strict
from carpool.adapters.torch.differences import Alones, Differences, Together, alike
from carpool.adapters.torch.full import is_full
from carpool.adapters.torch.stacked import Recipe
from carpool.errors import failure
from carpool.fidelity import DOUBLE, LOW, SINGLE, Tolerance


def tolerance(
    dtype: torch.dtype,
    device: torch.device,
    convolves: bool,
    recurs: bool = False,
    lowered: bool = False,
) -> Tolerance:
    """The tolerance for the lowest type of a step, given the precision that the user's settings leave to matrix products.

    `lowered` says that autocast computes in 16 bits; it leaves float64 alone.
    """
    if dtype == torch.float64:
        return DOUBLE
    loose = lowered or dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda":
        loose |= precision.multiplies_in_tf32() or (convolves and precision.convolves_in_tf32())
        loose |= recurs and precision.recurs_in_tf32()
    return LOW if loose else SINGLE


def compare(
    recipe: Recipe,
    size: int,
    alone: Mapping[int, Alone],
    together: Mapping[str, Tensor],
    members: Mapping[int, Built],
    strict: Callable[[int], Strict],
    lowest: torch.dtype,
) -> Check:
    """The largest difference, and the first member beyond the tolerance, in words. `lowest` is the type in which the step computes least precisely.

    Where the precision is low, and deep networks amplify what it rounds off, a member may differ from itself by more than the tolerance.
    So who is beyond it there is computed once more alone, by `strict`, in full precision, which tells what is rounding (`noise.py`).
    """
    device = together["weights"].device
    allowed, loose = _allowed(recipe, device, members, lowest)
    worst, beyond = 0.0, None
    for rows in alike(recipe, alone):
        own = Alones([alone[row] for row in rows], device)
        found = Differences.between(
            recipe, Together(recipe, size, rows, together), own, own.sound(allowed.noise)
        )
        worst = max(worst, found.largest)
        for place, row in enumerate(rows if beyond is None else ()):
            words = found.words(place, np.full(len(found.places), allowed.weight))
            if words is not None and loose:
                fused = Together(recipe, size, [row], together)
                words = _beyond_rounding(recipe, fused, own.only(place), allowed, partial(strict, row), words)
            if words is not None:
                name = members[row].job.name
                beyond = f"the fused step of {name!r} differs from its step alone at {words}"
                break
    return Check(len(alone), worst, beyond)


def _beyond_rounding(
    recipe: Recipe,
    fused: Together,
    alone: Alones,
    allowed: Tolerance,
    strict: Callable[[], Strict],
    words: str,
) -> str | None:
    """Where one member's fused step differs by more than its precision explains, or None; the same words where that cannot be told."""
    try:
        itself = strict()
    except BaseException as error:  # it runs in low precision only
        failure(error)
        if is_full(error):
            raise
        return words
    sound = alone.sound(max(allowed.noise, noise.gradients(alone.first, itself.step)))
    reach = np.maximum(allowed.weight, noise.allowance(recipe, alone, itself, sound))
    return Differences.between(recipe, fused, alone, sound).words(0, reach)


def _allowed(
    recipe: Recipe, device: torch.device, members: Mapping[int, Built], lowest: torch.dtype
) -> tuple[Tolerance, bool]:
    """The tolerance, and whether it is the one of a low precision that full precision is beyond."""
    convolves = any(len(leaf.shape) > 2 for leaf in recipe.layout.leaves)
    recurs = any(isinstance(module, nn.RNNBase) for module in recipe.training.modules())
    lowered = any(precision.computes_in_16_bits(b.job.precision, device.type) for b in members.values())
    found = tolerance(lowest, device, convolves, recurs, lowered and recipe.layout.dtype != torch.float64)
    return found, recipe.layout.dtype == torch.float32 and found != SINGLE
