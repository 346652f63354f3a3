"""When optimizers update: at every n-th batch of an epoch and at its last, and a phase at every n-th step."""

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


def due_at(built: Built, course: Course, batch: int, step: int) -> tuple[bool, ...]:
    """Which phases' optimizers update at a batch of an epoch, which is such a step of the whole run."""
    ready = updates_at(batch, course.batches, built.job.accumulate)
    return tuple(ready and step % phase.every == 0 for phase in built.phases)


def due(chunk: Chunk, members: Mapping[int, tuple[Built, Course]], width: int) -> np.ndarray:
    """Which rows' optimizers update at which of the chunk's steps: [steps, members, phases]."""
    phases = max(len(built.phases) for built, _ in members.values())
    made = np.zeros((chunk.steps, width, phases), dtype=bool)
    for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
        built, course = members[row]
        made[:, row] = [due_at(built, course, cursor.batch + i, cursor.step + i) for i in range(chunk.steps)]
    return made
