"""What a step is fed: batches of arrays in the order that `carpool.batch_order` says, values that stay, feed dicts of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from carpool.errors import DataError, sentence
from carpool.order import batch_order

Fed = Mapping[str, np.ndarray]
"""Values by the names of the tensors they are fed to."""


class Exhausted(Exception):
    """The input has ended, and with it the job."""


@dataclass
class Arrays:
    """Arrays of one length, read in batches."""

    arrays: Mapping[str, np.ndarray]
    places: np.ndarray
    batch_size: int
    seed: int
    shuffle: bool
    _epoch: int = -1
    _order: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.places)

    def batch(self, epoch: int, number: int) -> Fed:
        if self._order is None or (self.shuffle and epoch != self._epoch):
            order = batch_order(self.seed, epoch, self.length) if self.shuffle else slice(None)
            self._order, self._epoch = self.places[order], epoch
        chosen = self._order[number * self.batch_size : (number + 1) * self.batch_size]
        return {name: array[chosen] for name, array in self.arrays.items()}


Maker = Callable[[int], Mapping[Any, Any]]


def maker(given: Any) -> Maker | None:
    """A function of the step's number for what gives a feed dict a step; None for values that stay."""
    if given is None or isinstance(given, Mapping):
        return None
    if isinstance(given, Iterator):
        return _following(given)
    if callable(given):
        return _called(given)
    raise DataError(
        sentence(
            "feeds to map placeholders to values, or to give a feed dict a step",
            type(given).__name__,
            "pass a dict, a function of the step's number, or an iterator",
        )
    )


def _called(make: Callable[..., Any]) -> Maker:
    return make if _takes_one(make) else lambda step: make()


def _following(given: Iterator[Mapping[Any, Any]]) -> Maker:
    def following(step: int) -> Mapping[Any, Any]:
        try:
            return next(given)
        except StopIteration:
            raise Exhausted from None

    return following


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(0)
    except (TypeError, ValueError):
        return False
    return True


def arrays_of(data: Mapping[Any, Any], tensor: Callable[[Any, str], Any], word: str) -> dict[str, np.ndarray]:
    """The arrays by the names of their tensors, in the types of these."""
    found = {}
    for name, given in data.items():
        placeholder = tensor(name, f"{word}[{name!r}]")
        found[placeholder.name] = typed(given, placeholder)
    lengths = {name: array.shape[0] if array.ndim else None for name, array in found.items()}
    if len(set(lengths.values())) != 1 or (lengths.keys() and not all(lengths.values())):
        raise DataError(
            sentence(
                f"{word} of arrays with one first dimension", f"first dimensions {lengths}", "align them"
            )
        )
    return found


def typed(value: Any, placeholder: Any) -> np.ndarray:
    """The value as the tensor takes it."""
    kind = placeholder.dtype.as_numpy_dtype
    try:
        made = np.asarray(value, dtype=object if placeholder.dtype.name == "string" else kind)
    except (TypeError, ValueError) as error:
        raise DataError(
            sentence(
                f"a value of type {placeholder.dtype.name} for {placeholder.name!r}",
                type(value).__name__,
                f"pass arrays of that type ({error})",
            )
        ) from error
    if not placeholder.shape.is_compatible_with(made.shape) and not _batched(placeholder, made):
        raise DataError(
            sentence(f"{placeholder.shape} for {placeholder.name!r}", str(made.shape), "reshape the value")
        )
    return made


def _batched(placeholder: Any, value: np.ndarray) -> bool:
    """Whether batches of the value would fit: a placeholder may say its batch size."""
    shape = placeholder.shape
    return shape.rank is None or (
        shape.rank == value.ndim > 0 and shape[1:].is_compatible_with(value.shape[1:])
    )


def samples(fed: Fed, names: Sequence[str]) -> int:
    return len(fed[names[0]]) if names else 1
