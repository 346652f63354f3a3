"""A row's step together beside its model's own step alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from carpool.adapters.base import Check
from carpool.fidelity import lowest, tolerance

CHECKED: set[Any] = set()
"""Structures whose first step was compared in this process."""
_FLOATING = ("float64", "float32", "float16", "bfloat16")


def lowest_of(model: Any) -> str:
    """The least precise of the types in which a model's layers compute and its variables are kept."""
    layers = model._flatten_layers()
    found = {layer.compute_dtype for layer in layers} | {str(variable.dtype) for variable in model.variables}
    return lowest(kind for kind in found if kind in _FLOATING)


def compared(name: str, alone: Mapping[str, Any], together: Mapping[str, Any], lowest: str) -> Check:
    """`lowest` is the type in which the model computes least precisely."""
    allowed = tolerance(lowest).value
    worst, mismatch = 0.0, None
    for (path, ours), theirs in zip(alone.items(), together.values(), strict=True):
        with np.errstate(
            invalid="ignore"
        ):  # a rate that is too high makes infinities of both in its first step
            difference = float(np.nan_to_num(np.abs(ours - theirs)).max(initial=0.0))
        worst = max(worst, difference)
        if (
            not np.allclose(theirs, ours, rtol=allowed, atol=allowed / 10, equal_nan=True)
            and mismatch is None
        ):
            mismatch = f"{name!r}: {path} differs by {difference:.1e} after a step"
    return Check(1, worst, mismatch)
