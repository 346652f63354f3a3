"""Which samples each row of a stack reads, epoch by epoch: laid out on the device when a row starts an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carpool.adapters.torch.shuffle import Shuffler
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
        self._shufflers: dict[tuple[int, ...], Shuffler] = {}

    def set(self, row: int, places: Tensor, shuffle: bool, seed: int) -> None:
        """A row reads these positions from its next epoch on, shuffled by its seed."""
        self._places[row, : len(places)] = places.to(self._places.device)
        self._seeds[row] = seed
        self._lengths[row], self._shuffles[row], self._epochs[row] = len(places), shuffle, -1
        self._forget([row])

    def lay(self, chunk: Chunk) -> None:
        """Lays out the order of the epoch for the rows of the chunk that start one."""
        kinds: dict[tuple[int, bool, int], list[int]] = {}
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            if self._epochs[row] != cursor.epoch:
                kinds.setdefault((self._lengths[row], self._shuffles[row], cursor.epoch), []).append(row)
        for (length, shuffle, epoch), rows in kinds.items():
            index = sent(rows, self._order.device)
            if shuffle:
                self._order[index, :length] = self._shuffler(tuple(rows), length).epoch(epoch)
            else:
                self._order[index, :length] = self._places[index, :length]
            for row in rows:  # only now: who raised is laid out when it is asked for again
                self._epochs[row] = epoch

    def _shuffler(self, rows: tuple[int, ...], length: int) -> Shuffler:
        """Of these rows together: as long as the same ones start their epochs at once, it has made some ahead."""
        if rows not in self._shufflers:
            self._forget(rows)
            places = self._places[sent(rows, self._order.device), :length]
            self._shufflers[rows] = Shuffler(places, [self._seeds[row] for row in rows])
        return self._shufflers[rows]

    def _forget(self, rows: Sequence[int]) -> None:
        gone = set(rows)
        self._shufflers = {held: one for held, one in self._shufflers.items() if gone.isdisjoint(held)}

    def moved(self, rows: Sequence[int], order: Tensor) -> Orders:
        """The same rows in other places of a stack of another width, whose tensor is given."""
        made = Orders(order)
        made._seeds = [self._seeds[row] for row in rows]
        made._places = self._places[torch.tensor(list(rows), device=order.device)]
        made._lengths = [self._lengths[row] for row in rows]
        made._shuffles = [self._shuffles[row] for row in rows]
        made._epochs = [self._epochs[row] for row in rows]
        return made
