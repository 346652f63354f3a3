"""The members' data on the device: each distinct nest once, those of several members end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras.src import tree

from carpool.adapters.keras.data import Arrays


class Pool:
    """`nest` holds every member's samples; member i's begin at `starts[i]`."""

    def __init__(self, members: Sequence[Any], place: Callable[[np.ndarray], Any]) -> None:
        distinct: dict[Any, Arrays] = {}
        for data in members:
            distinct.setdefault(data.key, data)
        starts: dict[Any, int] = {}
        total = 0
        for key, data in distinct.items():
            starts[key] = total
            total += data.length
        self.starts = np.asarray([starts[data.key] for data in members], np.int32)
        nests = [data.nest for data in distinct.values()]
        self.nest = tree.map_structure(lambda *leaves: _placed(leaves, place), *nests)

    def of(self, rows: Sequence[int]) -> Pool:
        """The pool as these rows see it."""
        other = object.__new__(Pool)
        other.nest, other.starts = self.nest, self.starts[list(rows)]
        return other


def _placed(leaves: Sequence[Any], place: Callable[[np.ndarray], Any]) -> Any:
    if leaves[0] is None:
        return None
    return place(leaves[0] if len(leaves) == 1 else np.concatenate(leaves))
