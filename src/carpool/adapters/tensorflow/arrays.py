"""Data that is all there: a nest of arrays or tensors, and the view of it that a job reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.adapters.tensorflow.says import says
from carpool.errors import DataError
from carpool.job import Job
from carpool.positions import positions


@dataclass(frozen=True)
class Arrays:
    """A nest of arrays with one first dimension. `structure` has their positions where the nest has arrays."""

    leaves: tuple[Any, ...]
    structure: Any
    index: np.ndarray | None = None

    @property
    def samples(self) -> int:
        return int(self.leaves[0].shape[0])

    @property
    def length(self) -> int:
        return self.samples if self.index is None else len(self.index)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What a sample is."""
        return (str(self.structure), *((tuple(leaf.shape[1:]), kind(leaf).name) for leaf in self.leaves))

    def nest(self, leaves: Any) -> Any:
        return tf.nest.pack_sequence_as(self.structure, list(leaves))

    def batch(self, size: int | None) -> Any:
        """The shapes and types of a batch; of None, of batches of any size."""
        return self.nest(tf.TensorSpec((size, *leaf.shape[1:]), kind(leaf)) for leaf in self.leaves)

    def gathered(self, placed: Any, positions: Any) -> Any:
        """The samples at these positions of the leaves that lie on the device."""
        return self.nest(tf.gather(leaf, positions) for leaf in placed)


def kind(leaf: Any) -> tf.DType:
    return tf.as_dtype(leaf.dtype)


def build_arrays(job: Job, data: Any, word: str) -> Arrays:
    """The user's nest, checked; nothing is copied."""
    leaves = tf.nest.flatten(data)
    if not leaves:
        raise DataError(says(job, f"arrays as {word}", "none", "pass a tuple of arrays (x, y)"))
    for leaf in leaves:
        if not isinstance(leaf, np.ndarray | tf.Tensor) or not leaf.shape:
            remedy = "convert it with np.asarray"
            raise DataError(says(job, f"NumPy arrays or tensors as {word}", type(leaf).__name__, remedy))
    check_pair(job, data, word)
    lengths = [int(leaf.shape[0]) for leaf in leaves]
    if len(set(lengths)) > 1:
        raise DataError(says(job, f"arrays of one length as {word}", f"lengths {lengths}", "align x and y"))
    structure = tf.nest.pack_sequence_as(data, list(range(len(leaves))))
    view = positions(job.index, lengths[0], job.name) if word == "data" else None
    arrays = Arrays(tuple(leaves), structure, view)
    if arrays.length == 0:
        remedy = "pass more data, or leave the job out"
        raise DataError(says(job, f"at least one sample as {word}", "0", remedy))
    return arrays


def check_pair(job: Job, data: Any, word: str) -> None:
    if job.loss is not None and not (isinstance(data, tuple | list) and len(data) == 2):
        remedy = "pass a pair, or use step="
        raise DataError(says(job, f"{word}=(x, y) beside loss=", type(data).__name__, remedy))


class Store:
    """The arrays of a run on their device; asking twice for one gives the one copy."""

    def __init__(self) -> None:
        self._held: dict[Any, tuple[Any, Any]] = {}

    def on(self, device: str, array: Any) -> Any:
        """The array on the device. The user's own is kept too, so that its id stays taken."""
        key = (device, id(array))
        if key not in self._held:
            with tf.device(device):
                self._held[key] = (array, tf.identity(tf.convert_to_tensor(array)))
        return self._held[key][1]

    def all(self, device: str, arrays: Arrays) -> list[Any]:
        return [self.on(device, leaf) for leaf in arrays.leaves]

    def clear(self) -> None:
        self._held.clear()
