"""Data in a job's own order for its model's own `fit`: no global seed decides it."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras.src import tree
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.utils import PyDataset

from carpool.adapters.keras.fit import Fit
from carpool.order import batch_order


class Ordered(PyDataset):
    """Arrays, sample by sample in the order of the epoch."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        assert fit.training is not None
        self._nest, self._job = fit.training.nest, fit.job
        self._positions = np.arange(fit.training.length) if fit.index is None else fit.index
        self._size = fit.job.batch_size
        self.epoch = fit.options.initial_epoch

    def __len__(self) -> int:
        return -(-len(self._positions) // self._size)

    def __getitem__(self, item: int) -> Any:
        order = self._positions
        if self._job.shuffle:
            order = order[batch_order(self._job.seed, self.epoch, len(order))]
        taken = order[item * self._size : (item + 1) * self._size]
        return tree.map_structure(lambda leaf: None if leaf is None else leaf[taken], self._nest)


class Reordered(PyDataset):
    """A PyDataset of the user's own, batch by batch in the order of the epoch."""

    def __init__(self, given: PyDataset, seed: int, epoch: int) -> None:
        super().__init__(given.workers, given.use_multiprocessing, given.max_queue_size)
        self._given, self._seed, self.epoch = given, seed, epoch

    def __len__(self) -> int:
        return len(self._given)  # type: ignore[arg-type]

    def __getitem__(self, item: int) -> Any:
        return self._given[int(batch_order(self._seed, self.epoch, len(self))[item])]

    def on_epoch_begin(self) -> None:
        self._given.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._given.on_epoch_end()


def in_order(fit: Fit) -> Any:
    """What `fit` is given as x."""
    if fit.training is not None:
        return Ordered(fit)
    x = fit.given.x
    if isinstance(x, PyDataset) and fit.job.shuffle and x.num_batches is not None:
        return Reordered(x, fit.job.seed, fit.options.initial_epoch)
    return x


class _AsArrays(PyDatasetAdapter):
    """A train_step gets its batches as of arrays: of x alone, x, which Keras makes a tuple of where a PyDataset gives it."""

    def _standardize_batch(self, batch: Any) -> Any:
        return batch


def as_arrays(data: Any) -> Any:
    """What `fit` may be given for arrays in an order."""
    return _AsArrays(data) if isinstance(data, Ordered) else data
