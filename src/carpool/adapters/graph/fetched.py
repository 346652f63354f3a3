"""What steps fetched: numbers for the history, and arrays for the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def scalars(made: Mapping[str, Any]) -> dict[str, float]:
    """Those that are one number."""
    return {
        name: float(value)
        for name, value in made.items()
        if np.ndim(value) == 0
        and isinstance(value, np.number | np.bool_ | int | float | np.ndarray)
        and np.asarray(value).dtype.kind in "biufV"
    }


class Fetched:
    """The last of everything; `is_whole`: all of it, in order, rows of batches end to end."""

    def __init__(self, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._made: dict[str, list[Any]] = {}
        self._samples: list[int | None] = []

    def take(self, made: Mapping[str, Any], samples: int | None) -> None:
        if not self._is_whole:
            self._made = {name: [value] for name, value in made.items()}
            return
        self._samples.append(samples)
        for name, value in made.items():
            self._made.setdefault(name, []).append(value)

    @property
    def values(self) -> dict[str, np.ndarray]:
        return {name: self._joined(made) for name, made in self._made.items()}

    def _joined(self, made: list[Any]) -> np.ndarray:
        arrays = [np.asarray(one) for one in made]
        if len(arrays) == 1:
            return arrays[0]
        batched = all(one.ndim and len(one) == size for one, size in zip(arrays, self._samples, strict=False))
        if self._is_whole and batched and None not in self._samples:
            return np.concatenate(arrays)
        if len({one.shape for one in arrays}) == 1:
            return np.stack(arrays)
        ragged = np.empty(len(arrays), object)
        ragged[:] = arrays
        return ragged
