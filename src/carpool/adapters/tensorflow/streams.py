"""Data that comes in batches: a `tf.data.Dataset` read inside the traced loop, anything else read ahead in the background."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.adapters.tensorflow.arrays import Arrays, check_pair
from carpool.adapters.tensorflow.says import says
from carpool.data import Queue
from carpool.errors import DataError, sentence
from carpool.job import Job
from carpool.source import Source, batches_of, gives_samples, passes_of


@dataclass(frozen=True)
class Piped:
    """A `tf.data.Dataset`, batched by the user."""

    dataset: Any
    batches: int | None
    """In an epoch; None where it only turns out."""
    size: int
    """Of a batch, as far as the dataset says: 0 where it does not."""

    @property
    def shapes(self) -> tuple[Any, ...]:
        return (str(self.dataset.element_spec),)

    def batch(self) -> Any:
        return self.dataset.element_spec


@dataclass(frozen=True)
class Batch:
    """A batch on its device, its leaves in the order of the nest."""

    leaves: tuple[Any, ...]
    nest: Any
    size: int


@dataclass(frozen=True)
class Streamed:
    """Batches that Python makes. `first` tells shapes and types."""

    source: Source
    first: Arrays

    @property
    def shapes(self) -> tuple[Any, ...]:
        return self.first.shapes


def piped(job: Job, dataset: Any) -> Piped:
    _refuse_index(job, "a tf.data.Dataset")
    batches = int(dataset.cardinality())
    if batches == tf.data.INFINITE_CARDINALITY:
        remedy = "say how many batches an epoch has: dataset.take(n)"
        raise DataError(says(job, "a tf.data.Dataset that ends", "one that repeats forever", remedy))
    spec = dataset.element_spec
    check_pair(job, spec, "data")
    shapes = [one.shape for one in tf.nest.flatten(spec)]
    if any(shape.rank == 0 for shape in shapes):
        raise DataError(says(job, "a tf.data.Dataset of batches", f"{spec}", "call dataset.batch(n)"))
    known = batches if batches != tf.data.UNKNOWN_CARDINALITY else None
    if known == 0:
        raise DataError(says(job, "at least one batch an epoch", "none", "pass more data"))
    return Piped(dataset.prefetch(job.prefetch), known, _batch_size(dataset))


def _batch_size(dataset: Any) -> int:
    """What the dataset was batched by, of a dataset that says it in its shapes or in the step that batched it."""
    shape = next(iter(tf.nest.flatten(dataset.element_spec))).shape
    if shape.rank and shape[0] is not None:
        return int(shape[0])
    while dataset is not None:
        if (size := getattr(dataset, "_batch_size", None)) is not None:
            return int(size)
        dataset = getattr(dataset, "_input_dataset", None)
    return 0


class Landing:
    """Takes a batch to the device, in the thread that read it."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, batch: Any) -> Batch:
        nest = tuple(batch) if isinstance(batch, list) else batch
        with tf.device(self._device):
            leaves = tuple(tf.identity(_tensor(leaf)) for leaf in tf.nest.flatten(nest))
        sizes = {leaf.shape[0] if leaf.shape.rank else 0 for leaf in leaves}
        if len(sizes) != 1 or sizes == {0}:
            received = f"first dimensions {sorted(sizes)}"
            raise DataError(
                sentence("batches of arrays with one first dimension", received, "yield arrays of samples")
            )
        return Batch(leaves, tf.nest.pack_sequence_as(nest, list(range(len(leaves)))), int(sizes.pop()))


def _tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, tf.Tensor) else np.asarray(leaf)


@dataclass
class Streams:
    """The sources of a run: one for each thing that jobs name."""

    device: Callable[[], str]
    _sources: dict[Hashable, tuple[Any, Source]] = field(default_factory=dict)

    def of(self, job: Job, data: Any, again: Callable[[], Any] | None) -> Streamed:
        """The stream of a job. `again` makes the data anew for a later pass, where a function made it."""
        _refuse_index(job, type(data).__name__)
        key, passes = passes_of(job, data, again, _batched if gives_samples(data) else None)
        capacity = data.capacity if isinstance(data, Queue) else job.prefetch
        if key not in self._sources:
            self._sources[key] = (data, Source(passes, capacity, Landing(self.device())))
        source = self._sources[key][1]
        first = source.first()
        check_pair(job, first.nest, "data")
        return Streamed(source, Arrays(first.leaves, first.nest))

    def stop(self) -> None:
        for _, source in self._sources.values():
            source.stop()
        self._sources.clear()


def is_dataset(data: Any) -> bool:
    return isinstance(data, tf.data.Dataset)


def is_stream(data: Any) -> bool:
    """Whether the data comes in batches or samples, not as arrays."""
    if isinstance(data, tuple | list | dict | np.ndarray | tf.Tensor | str):
        return False
    return hasattr(data, "__iter__") or gives_samples(data)


def gathered(data: Any, batch_size: int) -> Any:
    """One pass as arrays, for validation: read once and kept."""
    passes = data
    if is_dataset(data):
        passes = data.as_numpy_iterator()
    elif gives_samples(data):
        passes = batches_of(data, np.arange(len(data)), batch_size, _batched)
    batches = [tuple(batch) if isinstance(batch, list) else batch for batch in passes]
    if not batches:
        raise DataError(sentence("at least one batch as validation_data", "none", "pass more data"))
    parts = zip(*(tf.nest.flatten(batch) for batch in batches), strict=True)
    whole = [np.concatenate([np.asarray(part) for part in column]) for column in parts]
    return tf.nest.pack_sequence_as(batches[0], whole)


def _batched(samples: Sequence[Any]) -> Any:
    columns = zip(*(tf.nest.flatten(sample) for sample in samples), strict=True)
    stacked = [np.stack([np.asarray(leaf) for leaf in column]) for column in columns]
    return tf.nest.pack_sequence_as(samples[0], stacked)


def _refuse_index(job: Job, received: str) -> None:
    if job.index is not None:
        raise DataError(says(job, "index= beside arrays", received, "leave index= out, or pass arrays"))
