"""Which samples each row of a stack reads, epoch by epoch: laid out on the device when a row starts an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.torch.shuffle import Shuffler
from carpool.adapters.torch.standing import Rows
from carpool.order import bucket_bits


@dataclass(frozen=True)
class Places:
    """On a host, what each row reads and by what it is shuffled: whoever lays orders out by itself reads it here."""

    places: np.ndarray
    seeds: np.ndarray
    lengths: np.ndarray
    bits: np.ndarray
    """Of the buckets of a shuffle (`carpool.order`)."""
    shuffles: np.ndarray


class Orders:
    """The rows' positions in the pool, and the order of the epoch each row is in (`order`, a row each)."""

    def __init__(self, order: Tensor) -> None:
        self._order = order
        width = len(order)
        self._places = torch.zeros_like(order)
        self._seeds, self._lengths = np.zeros(width, np.int64), np.zeros(width, np.int64)
        self._bits = np.ones(width, np.int64)
        self._shuffles, self._epochs = np.ones(width, bool), np.full(width, -1, np.int64)
        self._shufflers: dict[tuple[int, ...], Shuffler] = {}

    def set(self, row: int, places: Tensor, shuffle: bool, seed: int) -> None:
        """A row reads these positions from its next epoch on, shuffled by its seed."""
        self._places[row, : len(places)] = places.to(self._places.device)
        self._seeds[row] = seed
        self._lengths[row], self._shuffles[row], self._epochs[row] = len(places), shuffle, -1
        self._bits[row] = bucket_bits(len(places))
        self._forget([row])

    @property
    def places(self) -> Places:
        """What rows that are set later change, too."""
        held = self._places.numpy()
        return Places(held, self._seeds, self._lengths, self._bits, self._shuffles.view(np.uint8))

    def lay(self, rows: Rows, epochs: np.ndarray) -> None:
        """Lays out the order of the epoch for those rows that start one; `epochs` has one for each, or one for all."""
        begins = self._epochs[rows.place] != epochs
        if not begins.any():
            return
        kinds = [self._lengths[rows.place], self._shuffles[rows.place], np.broadcast_to(epochs, begins.shape)]
        if begins.all() and all((kind == kind[0]).all() for kind in kinds):
            self._lay(rows, *(kind[0].item() for kind in kinds))
            return
        found, inverse = np.unique(np.stack(kinds)[:, begins], axis=1, return_inverse=True)
        for number, (length, shuffle, epoch) in enumerate(found.T.tolist()):
            held = tuple(rows.host[begins][inverse.reshape(-1) == number].tolist())
            self._lay(Rows(held, len(self._order), self._order.device), length, bool(shuffle), epoch)

    def _lay(self, rows: Rows, length: int, shuffle: bool, epoch: int) -> None:
        if shuffle:
            self._order[rows.device, :length] = self._shuffler(rows, length).epoch(epoch)
        else:
            self._order[rows.device, :length] = self._places[rows.device, :length]
        self._epochs[rows.place] = epoch  # only now: who raised is laid out when it is asked for again

    def _shuffler(self, rows: Rows, length: int) -> Shuffler:
        """Of these rows together: as long as the same ones start their epochs at once, it has made some ahead."""
        if rows.rows not in self._shufflers:
            self._forget(rows.rows)
            self._shufflers[rows.rows] = Shuffler(self._places[rows.device, :length], self._seeds[rows.place])
        return self._shufflers[rows.rows]

    def _forget(self, rows: Sequence[int]) -> None:
        gone = set(rows)
        self._shufflers = {held: one for held, one in self._shufflers.items() if gone.isdisjoint(held)}

    def moved(self, rows: Sequence[int], order: Tensor) -> Orders:
        """The same rows in other places of a stack of another width, whose tensor is given."""
        made = Orders(order)
        chosen = np.array(rows)
        made._places = self._places[torch.tensor(list(rows), device=order.device)]
        made._seeds, made._lengths = self._seeds[chosen], self._lengths[chosen]
        made._shuffles, made._epochs = self._shuffles[chosen], self._epochs[chosen]
        made._bits = self._bits[chosen]
        return made
