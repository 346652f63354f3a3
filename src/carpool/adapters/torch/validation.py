"""Validation of a stack's rows: what each reads, in launches of one shape, and the sums it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.base import MetricColumns
from carpool.adapters.torch import stack
from carpool.adapters.torch.build import Arrays
from carpool.adapters.torch.clock import Receipt
from carpool.adapters.torch.program import Program
from carpool.adapters.torch.stacked import Recipe, evaluate_step
from carpool.adapters.torch.store import Pool, Store
from carpool.adapters.torch.transfer import sent

Tensors = dict[str, Tensor]
Prepare = Callable[[str, int, Callable[[], Any], Tensors], Program]


class Validation:
    """The validation data of a stack. Rows that all read the same samples share one order."""

    def __init__(
        self, recipe: Recipe, state: Tensors, held: Mapping[int, Arrays], store: Store, device: str
    ) -> None:
        self._recipe = recipe
        self._lengths = {row: arrays.length for row, arrays in held.items()}
        pool = Pool(list(held.values()))
        positions = {row: pool.positions(arrays) for row, arrays in held.items()}
        first = next(iter(positions.values()))
        self._shared = all(torch.equal(first, other) for other in positions.values())
        order = torch.zeros(
            1 if self._shared else len(state["weights"]), max(map(len, positions.values())), dtype=torch.int32
        )
        for row, places in positions.items():
            order[0 if self._shared else row, : len(places)] = places
        data = {f"data:{i}": array for i, array in enumerate(pool.arrays(store, device))}
        self._tensors = (
            stack.evaluation_tensors(state, len(recipe.evaluated), device)
            | data
            | {"order": order.to(device)}
        )

    def launches(self, size: int, epochs: int) -> int:
        """About how many launches of this size so many epochs take."""
        return epochs * max(1, max(self._lengths.values()) // size)

    @property
    def tensors(self) -> Tensors:
        return self._tensors

    @property
    def kind(self) -> str:
        """Of its steps."""
        return "evaluate shared" if self._shared else "evaluate"

    def lengths(self, rows: Sequence[int]) -> dict[int, int]:
        """How many samples each of these rows has; those without any are left out."""
        return {row: self._lengths[row] for row in rows if row in self._lengths}

    def sizes(self, size: int) -> set[int]:
        """The batch sizes that these rows' samples make."""
        return {batch for _, _, batch, _ in self.passes(list(self._lengths), size)}

    def passes(self, rows: Sequence[int], size: int) -> list[tuple[list[int], int, int, int]]:
        """Launches of one shape: (rows, first sample, batch size, steps)."""
        return _passes(self.lengths(rows), size)

    def begin(self, rows: Sequence[int], size: int, prepare: Prepare) -> Evaluated:
        """Enqueues all samples of these rows; rows without any are left out."""
        lengths = self.lengths(rows)
        self._tensors["sums"].zero_()
        for chosen, start, batch, steps in _passes(lengths, size):
            self._launch(chosen, start, batch, size, steps, prepare)
        return Evaluated(Receipt(self._tensors["sums"].clone()), lengths, self._recipe.evaluated)

    def _launch(
        self, rows: Sequence[int], start: int, size: int, full: int, steps: int, prepare: Prepare
    ) -> None:
        device = self._tensors["order"].device
        stack.activate(self._tensors, sent(list(rows), device), sent([start], device))
        self._tensors["batch"].fill_(start // full)
        self._tensors["k"].zero_()
        prepare(self.kind, size, lambda: evaluate_step(self._recipe, size, self._shared), self._tensors).run(
            steps
        )


class Evaluated:
    """The sums of rows over all their samples, on their way to the host."""

    def __init__(self, receipt: Receipt, lengths: Mapping[int, int], names: Sequence[str]) -> None:
        self._receipt, self._lengths, self._names = receipt, lengths, names

    def done(self) -> bool:
        return self._receipt.done()

    def read(self) -> MetricColumns:
        rows = tuple(self._lengths)
        sums = self._receipt.read()[list(rows)]
        return MetricColumns(
            rows,
            np.zeros(len(rows), np.int64),
            np.array(list(self._lengths.values()), np.int64),
            {name: sums[:, column] for column, name in enumerate(self._names)},
            np.zeros(len(rows), bool),
        )


def _passes(lengths: Mapping[int, int], size: int) -> list[tuple[list[int], int, int, int]]:
    """Launches of one shape: (rows, first sample, batch size, steps)."""
    made: list[tuple[list[int], int, int, int]] = []
    for length in sorted(set(lengths.values())):
        rows = [row for row, own in lengths.items() if own == length]
        full, tail = divmod(length, size)
        if full:
            made.append((rows, 0, size, full))
        if tail:
            made.append((rows, full * size, tail, 1))
    return made
