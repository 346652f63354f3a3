"""How far from itself a low precision takes a member's step alone, and so how far from it a fused step may be.

Rounding errs in gradients, so weights are told by how much of their own step they are off: a bias that starts at zero is off by a fifth of
itself where a convolution's weights, which a step changes by some percent, are off by less than one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.torch.check import Alone, Strict
from carpool.adapters.torch.differences import Alones, Differences, moved
from carpool.adapters.torch.stacked import Recipe

_AGAIN = 4  # times what rounding makes of a step alone: a fused step rounds as well, and no two are alike
_BOTH = 2  # steps that round
_LARGEST = 0.5  # of the largest gradient: such ones are compared whatever the noise
_MOST = 1.0  # of a step: one in the wrong direction is two steps off


def gradients(alone: Alone, strict: Alone) -> float:
    """How far gradients are off, beside the largest of their phase. Below that an Adam step is the sign of a rounding error."""
    gaps = [
        (grad - strict.grads[name].to(grad.device)).abs().max() / alone.largest[name]
        for name, grad in alone.grads.items()
        if grad.numel() and name in strict.grads
    ]
    found = float(torch.stack(gaps).nan_to_num(0.0, posinf=0.0).max()) if gaps else 0.0
    return min(_BOTH * found, _LARGEST)


def allowance(recipe: Recipe, alone: Alones, strict: Strict, sound: Mapping[str, Tensor]) -> np.ndarray:
    """For each place, by how much the fused step of one member may differ from its step alone."""
    itself = Alones([strict.step], alone.device)
    found = Differences.between(recipe, alone, itself, sound)
    values = np.nan_to_num(found.values[:, 0], posinf=0.0)  # what is endless is no rounding
    kinds = np.array(found.kinds)
    steps = moved(recipe, strict.before, itself, sound)
    shares = np.divide(values[kinds == "weights"], steps, out=np.zeros_like(steps), where=steps > 0)
    state = values[kinds == "state"]  # of one scale: one place by itself may be off by little, by luck
    made = _AGAIN * values
    made[kinds == "weights"] = min(_AGAIN * shares.max(initial=0.0), _MOST) * steps
    made[kinds == "state"] = _AGAIN * state.max(initial=0.0)
    return made
