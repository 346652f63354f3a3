"""When an optimizer updates: at every n-th batch of an epoch and at its last."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from carpool.adapters.torch.build import Built
from carpool.planning.cursor import Chunk, Course


def updates_at(batch: int, batches: int, accumulate: int) -> bool:
    """Whether the gradients gathered so far are applied at this batch of an epoch that has so many.

    >>> [updates_at(batch, 5, accumulate=2) for batch in range(5)]
    [False, True, False, True, True]
    """
    return (batch + 1) % accumulate == 0 or batch + 1 == batches


def due(chunk: Chunk, members: Mapping[int, tuple[Built, Course]], width: int) -> np.ndarray:
    """Which rows' optimizers update at which of the chunk's steps: [steps, members]."""
    made = np.zeros((chunk.steps, width), dtype=bool)
    for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
        built, course = members[row]
        steps = range(cursor.batch, cursor.batch + chunk.steps)
        made[:, row] = [updates_at(batch, course.batches, built.job.accumulate) for batch in steps]
    return made
