"""Which samples each row of a stack reads, epoch by epoch: laid out on the device when a row starts an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carpool.adapters.torch.store import shuffled
from carpool.adapters.torch.transfer import sent
from carpool.planning.cursor import Chunk


class Orders:
    """The rows' positions in the pool, and the order of the epoch each row is in (`order`, a row each)."""

    def __init__(self, order: Tensor) -> None:
        self._order = order
        width = len(order)
        self._seeds = [0] * width
        self._places = torch.zeros_like(order)
        self._lengths = [0] * width
        self._shuffles = [True] * width
        self._epochs = [-1] * width

    def set(self, row: int, places: Tensor, shuffle: bool, seed: int) -> None:
        """A row reads these positions from its next epoch on, shuffled by its seed."""
        self._places[row, : len(places)] = places.to(self._places.device)
        self._seeds[row] = seed
        self._lengths[row], self._shuffles[row], self._epochs[row] = len(places), shuffle, -1

    def lay(self, chunk: Chunk) -> None:
        """Lays out the order of the epoch for the rows of the chunk that start one."""
        kinds: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            if self._epochs[row] != cursor.epoch:
                kinds.setdefault((self._lengths[row], self._shuffles[row]), []).append((row, cursor.epoch))
                self._epochs[row] = cursor.epoch
        for (length, shuffle), pairs in kinds.items():
            rows = sent([row for row, _ in pairs], self._order.device)
            places = self._places[rows, :length]
            keys = [(self._seeds[row], epoch) for row, epoch in pairs]
            self._order[rows, :length] = shuffled(places, keys) if shuffle else places

    def moved(self, rows: Sequence[int], order: Tensor) -> Orders:
        """The same rows in other places of a stack of another width, whose tensor is given."""
        made = Orders(order)
        made._seeds = [self._seeds[row] for row in rows]
        made._places = self._places[torch.tensor(list(rows), device=order.device)]
        made._lengths = [self._lengths[row] for row in rows]
        made._shuffles = [self._shuffles[row] for row in rows]
        made._epochs = [self._epochs[row] for row in rows]
        return made
