"""Data on the device: every distinct array once for a run, and where in a group's pool each row's samples lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.jax.build import Arrays


class Store:
    """The arrays of a run on their device; asking twice for one gives the one copy."""

    def __init__(self) -> None:
        self._held: dict[Any, tuple[Any, Any]] = {}

    def on(self, device: Any, array: Any) -> Any:
        """The array on the device. The user's own is kept too, so that its id stays taken."""
        key = (device, id(array))
        if key not in self._held:
            self._held[key] = (array, jax.device_put(array, device))
        return self._held[key][1]

    def clear(self) -> None:
        self._held.clear()


class Pool:
    """The data of a group's rows: those that name the same arrays share them, distinct ones lie end to end."""

    def __init__(self, rows: Sequence[Arrays], store: Store, device: Any) -> None:
        self._rows = list(rows)
        distinct = {row.key: row for row in self._rows}
        begins = np.cumsum([0, *(arrays.samples for arrays in distinct.values())])
        starts = dict(zip(distinct, begins.tolist(), strict=False))
        self.starts = np.asarray([starts[row.key] for row in self._rows], np.int32)
        self.lengths = np.asarray([row.length for row in self._rows], np.int32)
        placed = [[store.on(device, leaf) for leaf in arrays.leaves] for arrays in distinct.values()]
        leaves = (
            placed[0] if len(placed) == 1 else [jnp.concatenate(parts) for parts in zip(*placed, strict=True)]
        )
        self.nest = self._rows[0].nest(leaves)

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def places(self, rows: Sequence[int]) -> np.ndarray:
        """Where these rows' samples lie, in their own order; beyond a row's length, anything."""
        places = np.zeros((len(rows), self.longest), np.int32)
        for place, row in enumerate(rows):
            own = self._rows[row].index
            places[place, : self.lengths[row]] = (
                np.arange(self.lengths[row]) if own is None else own
            ) + self.starts[row]
        return places

    def narrow(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self.starts, self.lengths = self.starts[list(rows)], self.lengths[list(rows)]
