"""Which samples each row of a stack reads next: its epochs' orders, made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from carpool.adapters.jax.build import Built
from carpool.adapters.jax.order import shuffled, shuffled_on_host, words
from carpool.adapters.jax.pool import Pool, Store
from carpool.adapters.jax.program import Order
from carpool.planning.cursor import Chunk


class Reading:
    """The rows' data on the device, and their places in it."""

    def __init__(self, builts: Sequence[Built], store: Store, device: Any) -> None:
        self._builts, self._device = list(builts), device
        self.pool = Pool([built.data for built in builts], store, device)
        self.is_shared = len({_read(built) for built in builts}) == 1
        """Whether all rows read the same in the same order; one order then stands for all of them."""
        self._begin()

    def _begin(self) -> None:
        rows = [0] if self.is_shared else list(range(len(self._builts)))
        jobs = [self._builts[row].job for row in rows]
        self._host_places = self.pool.places(rows)
        self._places = jax.device_put(self._host_places, self._device)
        self._lengths = self.pool.lengths[rows].astype(np.uint32)
        self._job_seeds = [job.seed for job in jobs]
        self._seeds = np.asarray([words(job.seed) for job in jobs], np.uint32)
        self._shuffles = np.asarray([job.shuffle for job in jobs])
        self._epochs = np.full(len(rows), -1, np.int64)
        self._batch_sizes = np.asarray([built.job.batch_size for built in self._builts])
        self._order: Any = self._places

    @property
    def nest(self) -> Any:
        return self.pool.nest

    def taken(self) -> None:
        """Nothing: the data stays where it is."""

    def close(self) -> None:
        """Nothing: the run's store holds the data."""

    def order(self, chunk: Chunk) -> Order:
        """What the chunk's rows read."""
        offsets = np.zeros(len(self._builts), np.int32)
        epochs = self._epochs.copy()
        rows = list(chunk.rows)
        offsets[rows] = [cursor.batch for cursor in chunk.cursors] * self._batch_sizes[rows]
        if not self.is_shared:
            epochs[rows] = [cursor.epoch for cursor in chunk.cursors]
        else:
            epochs[0] = chunk.cursors[0].epoch
            if len({(cursor.epoch, cursor.batch) for cursor in chunk.cursors}) > 1:
                self.is_shared = False
                self._begin()
                return self.order(chunk)
            offsets[:] = offsets[chunk.rows[0]]
        if self._shuffles.any() and (epochs != self._epochs).any():
            self._order = self._shuffled(np.maximum(epochs, 0))
            self._epochs = epochs
        return Order(self._order, offsets)

    def _shuffled(self, epochs: np.ndarray) -> Any:
        if self._device.platform == "cpu":
            made = shuffled_on_host(self._host_places, self._lengths, self._job_seeds, epochs)
            order = jax.device_put(made, self._device)
        else:
            order = shuffled(self._places, self._lengths, self._seeds, epochs.astype(np.uint32))
        if self._shuffles.all():
            return order
        return jax.numpy.where(self._shuffles[:, None], order, self._places)

    def narrow(self, rows: Sequence[int]) -> None:
        self._builts = [self._builts[row] for row in rows]
        self.pool.narrow(rows)
        self._begin()


def _read(built: Built) -> Any:
    """What a row reads, and in which order."""
    job = built.job
    seed = job.seed if job.shuffle else None
    index = None if built.data.index is None else built.data.index.tobytes()
    return built.data.key, index, seed, job.batch_size
