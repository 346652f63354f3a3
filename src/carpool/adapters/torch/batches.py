"""Where a job alone gets its batches: gathered from arrays on the device, or taken from a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from carpool.adapters.torch.build import Built
from carpool.adapters.torch.shuffle import Shuffler
from carpool.adapters.torch.store import Store
from carpool.adapters.torch.streams import Streamed, supply_of
from carpool.planning.cursor import Cursor, Supply


class Batches(ABC):
    """The batches of one job."""

    @abstractmethod
    def batch(self, cursor: Cursor, ahead: int, size: int) -> Any:
        """The batch `ahead` batches after the cursor's, which has `size` samples."""

    def supply(self) -> Supply | None:
        """What is there of a stream."""
        raise NotImplementedError("arrays are all there")

    def depth(self) -> tuple[int, int] | None:
        return None

    def take(self, count: int) -> None:
        """So many batches are used up."""
        return

    def close(self) -> None:
        return


class Held(Batches):
    """Arrays on the device, in the order of `carpool.batch_order`."""

    def __init__(self, built: Built, device: str, store: Store) -> None:
        self._data = built.data
        self._tensors = [store.on(device, tensor) for tensor in built.data.tensors]
        self._seed, self._shuffle, self._size = built.seed, built.job.shuffle, built.job.batch_size
        self._device = device
        self._order: tuple[int, torch.Tensor] | None = None
        self._shuffler: Shuffler | None = None

    def batch(self, cursor: Cursor, ahead: int, size: int) -> Any:
        start = (cursor.batch + ahead) * self._size
        index = self._positions(cursor.epoch)[start : start + size]
        return self._data.batch([tensor[index] for tensor in self._tensors])

    def _positions(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._places().epoch(epoch)[0] if self._shuffle else self._unshuffled())
        return self._order[1]

    def _places(self) -> Shuffler:
        if self._shuffler is None:
            self._shuffler = Shuffler(self._unshuffled()[None], np.array([self._seed]))
        return self._shuffler

    def _unshuffled(self) -> torch.Tensor:
        data = self._data
        return (data.index if data.index is not None else torch.arange(data.length)).to(self._device)

    def close(self) -> None:
        self._tensors, self._order, self._shuffler = [], None, None


class Flowing(Batches):
    """A stream's batches as they come."""

    def __init__(self, data: Streamed, epochs: int) -> None:
        assert data.source is not None
        self._tap = data.source.tap(epochs)

    def batch(self, cursor: Cursor, ahead: int, size: int) -> Any:
        return self._tap.ready()[ahead].batch.whole(shared=self._tap.shared)

    def supply(self) -> Supply | None:
        return supply_of(self._tap.ready())

    def depth(self) -> tuple[int, int]:
        return self._tap.depth, self._tap.capacity

    def take(self, count: int) -> None:
        self._tap.take(count)

    def close(self) -> None:
        self._tap.close()


def batches_of(built: Built, device: str, store: Store) -> Batches:
    if isinstance(built.data, Streamed):
        return Flowing(built.data, built.job.epochs)
    return Held(built, device, store)
