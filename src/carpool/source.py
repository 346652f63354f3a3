"""What a stream's batches are read from, whoever takes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from carpool.data import Reader, Tap
from carpool.job import Job
from carpool.order import batch_order

Passes = Callable[[int], Iterable[Any]]
"""The batches of an epoch, of its number."""


class Source:
    """What passes come from. Taps made before anything was taken share one reader: it is read once for all of them."""

    def __init__(
        self, passes: Callable[[int], Iterable[Any]], capacity: int, prepare: Callable[[Any], Any]
    ) -> None:
        self._passes, self.capacity, self._prepare = passes, capacity, prepare
        self._readers: list[Reader] = []

    def first(self) -> Any:
        """The first batch; it is read again by every tap."""
        return self._fresh().first().batch

    def tap(self, epochs: int) -> Tap:
        return self._fresh().tap(epochs)

    def _fresh(self) -> Reader:
        if not self._readers or not self._readers[-1].fresh:
            self._readers.append(Reader(self._passes, self.capacity, self._prepare))
        return self._readers[-1]

    def stop(self) -> None:
        for reader in self._readers:
            reader.stop()


def passes_of(
    job: Job, data: Any, again: Callable[[], Any] | None, batched: Callable[[Sequence[Any]], Any] | None
) -> tuple[Hashable, Passes]:
    """What makes two jobs' data one source, and its passes.

    `again` makes the data anew, where it is what a function made. `batched` makes a batch of samples, where the data gives them by their places.
    """
    if batched is not None:
        key = (id(data), job.seed if job.shuffle else None, job.batch_size)
        return key, lambda epoch: batches_of(data, _order(job, epoch, len(data)), job.batch_size, batched)
    if again is None:
        return id(data), lambda epoch: data
    first = [data]
    return id(data), lambda epoch: first.pop() if first else again()


def _order(job: Job, epoch: int, length: int) -> np.ndarray:
    return batch_order(job.seed, epoch, length) if job.shuffle else np.arange(length)


def batches_of(
    data: Any, places: np.ndarray, size: int, batched: Callable[[Sequence[Any]], Any]
) -> Iterator[Any]:
    """The samples at these places, so many at a time."""
    for start in range(0, len(places), size):
        yield batched([data[int(place)] for place in places[start : start + size]])


def gives_samples(data: Any) -> bool:
    """Whether it gives samples by number, as torch's map-style datasets do."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "__iter__")
