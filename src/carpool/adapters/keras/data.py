"""A Keras job's data: arrays that are all there, or something that Keras reads batch by batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from keras.src import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays

from carpool.errors import DataError, sentence


@dataclass(frozen=True, eq=False)
class Arrays:
    """A nest of NumPy arrays of one length, as a train_step takes it."""

    nest: Any
    length: int
    key: Hashable
    """Equal for data made of the same objects in the same way."""

    @property
    def leaves(self) -> list[np.ndarray]:
        return [leaf for leaf in tree.flatten(self.nest) if leaf is not None]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def form(self) -> Hashable:
        """What all data of a stack must have in common: the nest, and each leaf's type and shape but for its length."""
        shapes = tuple((str(leaf.dtype), leaf.shape[1:]) for leaf in self.leaves)
        return _structure(self.nest), shapes

    def batch(self, size: int) -> Any:
        """The first batch, for building."""
        return tree.map_structure(lambda leaf: None if leaf is None else leaf[:size], self.nest)


@dataclass(frozen=True, eq=False)
class Given:
    """What a job was given, taken apart as `fit` takes it."""

    x: Any
    y: Any = None
    sample_weight: Any = None
    source: Hashable = None
    """What it was cut from and how, where it is a part of something."""

    @property
    def is_arrays(self) -> bool:
        return can_convert_arrays((self.x, self.y, self.sample_weight))

    @property
    def key(self) -> Hashable:
        whole = (self.x, self.y, self.sample_weight)
        return self.source or (_structure(whole), *(id(leaf) for leaf in tree.flatten(whole)))


def given(data: Any) -> Given:
    """`(x,)`, `(x, y)`, `(x, y, sample_weight)`, or one thing alone."""
    if isinstance(data, tuple | list) and 1 <= len(data) <= 3 and not isinstance(data[0], int | float):
        return Given(*data)
    if isinstance(data, Mapping) and set(data) <= {"x", "y", "sample_weight"} and "x" in data:
        return Given(**data)
    return Given(data)


def arrays(given: Given, class_weight: Mapping[int, float] | None = None, name: str = "") -> Arrays:
    """The arrays with Keras' own conversions; raises DataError for those that do not fit together."""
    try:
        adapter = ArrayDataAdapter(
            given.x, given.y, sample_weight=given.sample_weight, class_weight=class_weight
        )
        nest = tree.map_structure(_whole, _sliceable(adapter._inputs), none_is_leaf=False)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"Job {name!r}: "
            + sentence("data that fits together", " ".join(str(error).split()), "pass arrays of one length")
        ) from error
    length = min(len(leaf) for leaf in tree.flatten(nest) if leaf is not None)
    if not length:
        raise DataError(f"Job {name!r}: " + sentence("at least one sample", "none", "pass data"))
    return Arrays(nest, length, key(given, class_weight))


def key(given: Given, class_weight: Mapping[int, float] | None) -> Hashable:
    """What tells these data from others."""
    return given.key, str(class_weight)


def split(given: Given, share: float, name: str = "") -> tuple[Given, Given]:
    """The first part for training, and the last share of it for validation."""
    if not given.is_arrays:
        raise DataError(
            f"Job {name!r}: "
            + sentence("arrays for validation_split", type(given.x).__name__, "pass validation_data")
        )
    try:
        first, last = cast(
            Any,
            array_slicing.train_validation_split(
                (given.x, given.y, given.sample_weight), validation_split=share
            ),
        )
    except ValueError as error:
        raise DataError(
            f"Job {name!r}: " + sentence("data that can be split", str(error), "pass validation_data")
        ) from error
    return (
        Given(first[0], first[1], first[2], (given.key, share, "first")),
        Given(last[0], last[1], last[2], (given.key, share, "last")),
    )


def _structure(nest: Any) -> str:
    return str(tree.map_structure(lambda leaf: None if leaf is None else 0, nest))


def _sliceable(inputs: Any) -> Any:
    return array_slicing.convert_to_sliceable(inputs, target_backend="numpy")


def _whole(sliceable: Any) -> np.ndarray:
    return np.asarray(sliceable.convert_to_numpy(sliceable[:]))
