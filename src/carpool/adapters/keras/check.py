"""A row's step together beside its model's own step alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from carpool.adapters.base import Check

CHECKED: set[Any] = set()
"""Structures whose first step was compared in this process."""
_RTOL, _ATOL = 2e-4, 2e-5  # of one step, in single precision


def compared(name: str, alone: Mapping[str, Any], together: Mapping[str, Any]) -> Check:
    worst, mismatch = 0.0, None
    for (path, ours), theirs in zip(alone.items(), together.values(), strict=True):
        with np.errstate(
            invalid="ignore"
        ):  # a rate that is too high makes infinities of both in its first step
            difference = float(np.nan_to_num(np.abs(ours - theirs)).max(initial=0.0))
        worst = max(worst, difference)
        if not np.allclose(theirs, ours, rtol=_RTOL, atol=_ATOL, equal_nan=True) and mismatch is None:
            mismatch = f"{name!r}: {path} differs by {difference:.1e} after a step"
    return Check(1, worst, mismatch)
