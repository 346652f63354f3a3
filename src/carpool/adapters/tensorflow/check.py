"""A row's step in a group beside its step as Python runs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from carpool.adapters.base import Check
from carpool.adapters.tensorflow.arrays import Arrays
from carpool.adapters.tensorflow.build import Built
from carpool.adapters.tensorflow.seeds import step_seed
from carpool.adapters.tensorflow.state import Remembered
from carpool.adapters.tensorflow.trace import floating
from carpool.fidelity import lowest, tolerance


def compared(
    built: Built, positions: np.ndarray, step: int, together: Sequence[np.ndarray], before: Remembered
) -> Check:
    """How far apart the variables are, relative to how far the step moves them; everything is put back."""
    data = built.data
    assert isinstance(data, Arrays)
    start = [held.read().numpy() for held in built.variables]
    try:
        batch = data.gathered([tf.convert_to_tensor(leaf) for leaf in data.leaves], positions)
        built.step(batch, step_seed(built.job.seed, step))
        alone = [held.read().numpy() for held in built.variables]
    finally:
        before.put_back()
    computed = floating(built.once(built.any_size))
    largest, mismatch = 0.0, None
    for held, ours, theirs, first in zip(built.variables, together, alone, start, strict=True):
        if not np.issubdtype(theirs.dtype, np.floating) or not theirs.size:
            continue
        difference = _apart(ours, theirs, first)
        largest = max(largest, difference)
        if difference > tolerance(lowest((str(theirs.dtype), *computed))).step:
            mismatch = f"{built.job.name!r}: {held.name!r} differs by {difference:.2g} of its first step"
    return Check(1, largest, mismatch)


def _apart(ours: np.ndarray, theirs: np.ndarray, first: np.ndarray) -> float:
    """The largest difference, relative to the step or to the values themselves; where both are not finite, there is none."""
    is_finite = np.isfinite(theirs)
    if not np.array_equal(is_finite, np.isfinite(ours)):
        return float("inf")
    if not is_finite.any():
        return 0.0
    moved = np.abs(theirs[is_finite] - first[is_finite]).max()
    scale = max(float(moved), 1e-2 * float(np.abs(first).max()), 1e-12)
    return float(np.abs(ours[is_finite] - theirs[is_finite]).max()) / scale
