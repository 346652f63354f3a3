"""When optimizers update: at every n-th batch of an epoch and at its last, and a phase at every n-th step."""

from __future__ import annotations

import numpy as np

from carpool.adapters.torch.build import Built
from carpool.adapters.torch.standing import Rows, Standing
from carpool.planning.cursor import Chunk


def updates_at(batch: int, last: bool, accumulate: int) -> bool:
    """Whether the gradients gathered so far are applied at this batch of an epoch, which may be its last.

    >>> [updates_at(batch, batch == 4, accumulate=2) for batch in range(5)]
    [False, True, False, True, True]
    """
    return last or (batch + 1) % accumulate == 0


def due_at(built: Built, chunk: Chunk, place: int, ahead: int) -> tuple[bool, ...]:
    """Which phases' optimizers update at a step of a chunk, for the member at this place in it."""
    cursor = chunk.cursors[place]
    last = ahead == chunk.steps - 1 and chunk.rows[place] in chunk.ends
    ready = updates_at(cursor.batch + ahead, last, built.job.accumulate)
    return tuple(ready and (cursor.step + ahead) % phase.every == 0 for phase in built.phases)


def due(built: Built, chunk: Chunk, where: Standing, rows: Rows, width: int) -> np.ndarray:
    """Which rows' optimizers update at which of the chunk's steps: [steps, members, phases].

    A group's members have one structure: `built`, any of them, has the same phases at the same steps.
    """
    ahead = np.arange(chunk.steps)[:, None]
    gathered = (where.batches + ahead + 1) % built.job.accumulate == 0
    ready = np.broadcast_to(gathered, (chunk.steps, len(rows.rows))).copy()
    ready[-1] |= True if chunk.ends == chunk.rows else np.isin(rows.host, chunk.ends)
    made = np.zeros((chunk.steps, width, len(built.phases)), dtype=bool)
    for number, phase in enumerate(built.phases):
        made[:, rows.place, number] = ready & ((where.steps + ahead) % phase.every == 0)
    return made
