"""The members' variables on the device: one matrix [members, columns] for each type of number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from carpool.adapters.keras.torch_step import Values, variables


@dataclass(frozen=True)
class Place:
    """Where a variable lies: its columns in the matrix of its type."""

    kind: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, matrices: dict[str, Tensor]) -> Tensor:
        """The variable of every member, [members, ...]."""
        matrix = matrices[self.kind]
        return matrix[:, self.start : self.start + self.size].view(len(matrix), *self.shape)


class Layout:
    """The places of a structure's variables, part by part."""

    def __init__(self, model: Any) -> None:
        self.widths: dict[str, int] = {}
        self.kinds: dict[str, torch.dtype] = {}
        self.parts = tuple([self._next(v.value) for v in part] for part in variables(model))

    def _next(self, value: Tensor) -> Place:
        kind = str(value.dtype).removeprefix("torch.")
        place = Place(kind, self.widths.get(kind, 0), tuple(value.shape))
        self.kinds[kind] = value.dtype
        self.widths[kind] = place.start + place.size
        return place

    def empty(self, rows: int, device: str) -> dict[str, Tensor]:
        return {
            kind: torch.zeros(rows, width, dtype=self.kinds[kind], device=device)
            for kind, width in self.widths.items()
        }

    def values(self, matrices: dict[str, Tensor]) -> Values:
        """Views of the matrices, in which writing is writing there."""
        return self.packed([place.of(matrices) for part in self.parts for place in part])

    def packed(self, flat: Sequence[Any]) -> Values:
        """One list of all variables, as parts."""
        rest = iter(flat)
        trainable, others, optimizer, metrics = ([next(rest) for _ in part] for part in self.parts)
        return trainable, others, optimizer, metrics


class State:
    """A stack: matrices, and what was made ready to run on them."""

    def __init__(self, layout: Layout, matrices: dict[str, Tensor]) -> None:
        self.layout, self.matrices = layout, matrices
        self.programs: dict[Any, Any] = {}
        self.changes = 0
        """Launches so far, so that a model that holds the row already is not written again."""

    @property
    def width(self) -> int:
        return len(next(iter(self.matrices.values())))

    def row(self, row: int) -> list[Tensor]:
        """Views of a member's variables, in the order of their parts."""
        return [value[row] for part in self.layout.values(self.matrices) for value in part]

    def of(self, rows: Sequence[int]) -> State:
        kept = list(rows)
        return State(self.layout, {kind: matrix[kept] for kind, matrix in self.matrices.items()})

    def begin(self, starts: Sequence[Tensor], rows: Sequence[int]) -> None:
        """The metrics of these rows begin anew."""
        for start, value in zip(starts, self.layout.values(self.matrices)[3], strict=True):
            if len(rows) == len(value):
                value.copy_(start.expand_as(value))
            else:
                for row in rows:
                    value[row].copy_(start)
