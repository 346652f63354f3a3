"""Which samples each row reads next: its epochs' orders, and its validation data from beginning to end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from carpool.adapters.keras.engine import Feed
from carpool.adapters.keras.fit import Fit
from carpool.adapters.keras.pool import Pool
from carpool.order import batch_orders
from carpool.planning.cursor import Chunk, Course, Cursor

_SHUFFLED = 8  # epochs that are shuffled at a time
_LONG = 1 << 16  # samples; orders up to this are kept for another fit


class Reading:
    """The rows' data on the device, and their places in it."""

    def __init__(
        self, fits: Mapping[int, Fit], place: Callable[[np.ndarray], Any], shares: bool = False
    ) -> None:
        """`shares`: rows that all read the same may be given one order."""
        self._fits = dict(fits)
        members = [fits[row] for row in sorted(fits)]
        self.is_shared = shares and len(fits) > 1 and len({_read(fit) for fit in members}) == 1
        self._training = Pool([fit.training for fit in members], place)
        held = [fit.validation for fit in members]
        self._validation = Pool(held, place) if None not in held else None
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._shuffles: dict[Any, np.ndarray] = {}

    @property
    def pool(self) -> Any:
        return self._training.nest

    @property
    def validates(self) -> bool:
        return self._validation is not None

    def feed(self, chunk: Chunk) -> Feed:
        """The chunk's batches; rows that are not in it read anything."""
        if self.is_shared and len({(cursor.epoch, cursor.batch) for cursor in chunk.cursors}) == 1:
            return Feed(self._training.nest, self._batches(chunk.rows[0], chunk.cursors[0], chunk)[None])
        order = np.zeros((len(self._fits), chunk.steps, chunk.size), np.int32)
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            order[row] = self._batches(row, cursor, chunk)
        return Feed(self._training.nest, order)

    def _batches(self, row: int, cursor: Cursor, chunk: Chunk) -> np.ndarray:
        start = cursor.batch * self._fits[row].job.batch_size
        taken = self._order(row, cursor.epoch)[start : start + chunk.steps * chunk.size]
        return taken.reshape(chunk.steps, chunk.size)

    def _order(self, row: int, epoch: int) -> np.ndarray:
        """The positions in the pool that a row reads in an epoch."""
        if (row, epoch) not in self._orders:
            fit = self._fits[row]
            for stale in [key for key in self._orders if key[0] == row and key[1] < epoch]:
                del self._orders[stale]
            order = self._shuffled(fit, fit.options.initial_epoch + epoch)
            if fit.index is not None:
                order = fit.index[order]
            self._orders[row, epoch] = (order + self._training.starts[row]).astype(np.int32)
        return self._orders[row, epoch]

    def _shuffled(self, fit: Fit, epoch: int) -> np.ndarray:
        """Rows of one seed and length share an order."""
        length = fit.course.length
        if not fit.job.shuffle:
            return np.arange(length)
        wanted = (fit.job.seed, length, epoch // _SHUFFLED)
        if wanted not in self._shuffles:
            if len(self._shuffles) > 2 * len(self._fits):
                self._shuffles.clear()
            shuffled = _shuffled if length <= _LONG else _shuffled.__wrapped__
            self._shuffles[wanted] = shuffled(fit.job.seed, epoch // _SHUFFLED * _SHUFFLED, length)
        return self._shuffles[wanted][epoch % _SHUFFLED]

    def validation(self, row: int) -> list[Feed]:
        """All validation data, in the batches of this row, which are those of all."""
        data = self._fits[row].validation
        assert self._validation is not None
        assert data is not None
        length, size = data.length, min(self._fits[row].validation_batch, data.length)
        whole = length // size * size
        positions = self._validation.starts[:, None] + np.arange(length, dtype=np.int32)
        feeds = [Feed(self._validation.nest, positions[:, :whole].reshape(len(self._fits), -1, size))]
        if whole < length:
            feeds.append(Feed(self._validation.nest, positions[:, None, whole:]))
        return feeds

    def narrow(self, rows: Sequence[int]) -> None:
        """Only these rows go on, and are numbered anew."""
        moved = {row: place for place, row in enumerate(rows)}
        self._fits = {place: self._fits[row] for row, place in moved.items()}
        self._training = self._training.of(rows)
        self._validation = self._validation and self._validation.of(rows)
        self._orders = {(moved[row], epoch): o for (row, epoch), o in self._orders.items() if row in moved}


@lru_cache(maxsize=32)
def _shuffled(seed: int, first: int, length: int) -> np.ndarray:
    return batch_orders([seed], range(first, first + _SHUFFLED), length).astype(np.int32)


def _read(fit: Fit) -> Hashable:
    """What decides which samples a fit reads."""
    seed = fit.job.seed if fit.job.shuffle else None
    index = None if fit.job.index is None else id(fit.job.index)
    assert fit.training is not None
    return seed, index, fit.options.initial_epoch, fit.training.key, epoch_of(fit.course)


def epoch_of(course: Course) -> tuple[int, int]:
    """What all epochs of a course are. Their number is left out: who ends first changes no program, and so no bit, of the others."""
    return course.length, course.batch_size


def shapes(course: Course, most: int) -> list[tuple[int, int]]:
    """The launches of an epoch: full batches in as few as may be, and the short last one."""
    whole, tail = divmod(course.length, course.batch_size)
    made = []
    if whole:
        made.append((min(whole, most), course.batch_size))
        if whole > most and whole % most:
            made.append((whole % most, course.batch_size))
    return [*made, (1, tail)] if tail else made
