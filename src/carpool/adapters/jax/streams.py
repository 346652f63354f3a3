"""Data that comes in batches: loaders, datasets, iterables and queues, read ahead in the background and laid on the device there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from carpool.adapters.jax.build import Arrays, says
from carpool.data import Item, Queue
from carpool.errors import DataError, sentence
from carpool.job import Job
from carpool.planning.cursor import Supply
from carpool.source import Source, batches_of, gives_samples, passes_of


@dataclass(frozen=True)
class Batch:
    """A batch on its device."""

    nest: Any
    size: int


class Landing:
    """Takes a batch to the device, in the thread that read it."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __call__(self, batch: Any) -> Batch:
        nest = jax.tree.map(np.asarray, as_nest(batch))
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(nest) if leaf.ndim}
        if len(sizes) != 1 or sizes == {0} or not all(leaf.ndim for leaf in jax.tree.leaves(nest)):
            raise DataError(
                sentence(
                    "batches of arrays with one first dimension",
                    f"first dimensions {sorted(sizes)}",
                    "yield arrays of samples",
                )
            )
        return Batch(jax.device_put(nest, self._device), sizes.pop())


@dataclass(frozen=True)
class Streamed(Arrays):
    """A job's streamed data. `leaves` are those of its first batch, which tell shapes and types."""

    source: Source | None = None


@dataclass
class Streams:
    """The sources of a run: one for each thing that jobs name."""

    device: Callable[[], Any]
    _sources: dict[Hashable, tuple[Any, Source]] = field(default_factory=dict)

    def of(self, job: Job, data: Any, again: Callable[[], Any] | None) -> Streamed:
        """The stream of a job. `again` makes the data anew for a later pass, where a function made it."""
        key, passes = _passes(job, data, again)
        capacity = data.capacity if isinstance(data, Queue) else job.prefetch
        if key not in self._sources:
            self._sources[key] = (data, Source(passes, capacity, Landing(self.device())))
        source = self._sources[key][1]
        first = source.first().nest
        if job.loss is not None and not (isinstance(first, tuple | list) and len(first) == 2):
            raise DataError(
                says(job, "batches (x, y) beside loss=", type(first).__name__, "yield pairs, or use step=")
            )
        leaves, tree = jax.tree.flatten(first)
        return Streamed(tuple(leaves), tree, source=source)

    def stop(self) -> None:
        for _, source in self._sources.values():
            source.stop()
        self._sources.clear()


def is_stream(data: Any) -> bool:
    """Whether the data comes in batches or samples, not as arrays."""
    if isinstance(data, tuple | list | dict | np.ndarray | jax.Array | str):
        return False
    return hasattr(data, "__iter__") or gives_samples(data)


def gathered(data: Any, batch_size: int) -> Any:
    """One pass as arrays, for validation: read once and kept."""
    passes = batches_of(data, np.arange(len(data)), batch_size, _batched) if gives_samples(data) else data
    batches = [jax.tree.map(np.asarray, as_nest(batch)) for batch in passes]
    if not batches:
        raise DataError(sentence("at least one batch as validation_data", "none", "pass more data"))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def as_nest(batch: Any) -> Any:
    """A batch with tuples where its source has lists: a loader's collate makes lists of pairs."""
    return tuple(batch) if isinstance(batch, list) else batch


def _passes(
    job: Job, data: Any, again: Callable[[], Any] | None
) -> tuple[Hashable, Callable[[int], Iterable[Any]]]:
    """What makes two jobs' data one source, and its passes."""
    if job.index is not None:
        raise DataError(
            says(job, "index= beside arrays", type(data).__name__, "leave index= out, or pass arrays")
        )
    if hasattr(data, "as_numpy_iterator") and not gives_samples(data):  # a tf.data.Dataset
        return id(data), lambda epoch: data.as_numpy_iterator()
    return passes_of(job, data, again, _batched if gives_samples(data) else None)


def _batched(samples: Sequence[Any]) -> Any:
    nests = [as_nest(sample) for sample in samples]
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *nests)


def supply_of(items: Sequence[Item]) -> Supply | None:
    """The batch at the front: each is a launch of its own."""
    return Supply(items[0].batch.size, 1, ends=items[0].last) if items else None
