"""Which samples a row reads next: its epochs' orders, as `carpool.batch_order` says."""

from __future__ import annotations

import numpy as np

from carpool.adapters.tensorflow.arrays import Arrays
from carpool.job import Job
from carpool.order import batch_order
from carpool.planning.cursor import Cursor


class Reading:
    """The order of one job's samples, an epoch at a time."""

    def __init__(self, job: Job, data: Arrays) -> None:
        self._job, self._data = job, data
        self._epoch, self._order = -1, np.zeros(0, np.int32)

    def batches(self, cursor: Cursor, steps: int, size: int) -> np.ndarray:
        """The positions [steps, size] of the batches from here on."""
        if cursor.epoch != self._epoch:
            self._epoch, self._order = cursor.epoch, self._ordered(cursor.epoch)
        first = cursor.batch * self._job.batch_size
        return self._order[first : first + steps * size].reshape(steps, size)

    def _ordered(self, epoch: int) -> np.ndarray:
        length = self._data.length
        order = batch_order(self._job.seed, epoch, length) if self._job.shuffle else np.arange(length)
        return (order if self._data.index is None else self._data.index[order]).astype(np.int32)
