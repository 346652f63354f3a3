"""The orders of the epochs to come, made several at a time: launched one by one, small epochs cost the host more than the device."""

from __future__ import annotations

import numpy as np
import torch

from carpool.adapters.torch.store import shuffled

_AHEAD_ELEMENTS = 1 << 18  # positions made at once; from there the device has as much to do as the host


class Shuffler:
    """Some rows' positions in the order of each epoch. It makes one epoch first, and twice as many each time they run out."""

    def __init__(self, positions: torch.Tensor, seeds: np.ndarray) -> None:
        self._positions, self._seeds = positions, seeds
        self._most = max(1, _AHEAD_ELEMENTS // max(1, positions.numel()))
        self._first = 0
        self._made: torch.Tensor | None = None

    def epoch(self, number: int) -> torch.Tensor:
        """[rows, length]"""
        if self._made is None or not 0 <= number - self._first < len(self._made):
            self._make(number)
        assert self._made is not None
        return self._made[number - self._first]

    def _make(self, first: int) -> None:
        follows = self._made is not None and first == self._first + len(self._made)
        count = min(self._most, 2 * len(self._made)) if follows and self._made is not None else 1
        epochs = np.repeat(np.arange(first, first + count), len(self._seeds))
        made = shuffled(self._positions.repeat(count, 1), np.tile(self._seeds, count), epochs)
        self._first, self._made = first, made.view(count, *self._positions.shape)
