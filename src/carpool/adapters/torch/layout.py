"""How a structure's leaves lie in a stack: trainable ones end to end in one matrix with a row for each member.

One matrix means one kernel for the whole update, one copy to keep or restore a member, one row to hand over. The
leaves of a parameter group lie together, so a group is a range of columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from carpool.adapters.torch.build import Built
from carpool.kernels.updates import UPDATES, Update

_ALIGN = 64  # elements: keeps every leaf's first address on a 128-byte line from 16-bit types up


@dataclass(frozen=True)
class Leaf:
    """A trainable leaf: its columns in the matrix."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Span:
    """A parameter group: its leaves, its columns, and the options that its members share."""

    leaves: tuple[Leaf, ...]
    start: int
    stop: int
    slots: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """The columns of a structure's matrix."""

    spans: tuple[Span, ...]
    update: Update
    width: int
    dtype: torch.dtype

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaf for span in self.spans for leaf in span.leaves)

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot for span in self.spans for slot in span.slots))

    def views(self, matrix: Tensor) -> dict[str, Tensor]:
        """Each leaf as a view of the matrix, members first."""
        rows = matrix.shape[0]
        return {
            leaf.name: matrix[:, leaf.start : leaf.start + leaf.size].view(rows, *leaf.shape)
            for leaf in self.leaves
        }

    def flat(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Stacked leaves as one matrix; the gaps between them are zeros."""
        parts: list[Tensor] = []
        at = 0
        for leaf in self.leaves:
            stacked = leaves[leaf.name].reshape(-1, leaf.size)
            if leaf.start > at:
                parts.append(stacked.new_zeros(len(stacked), leaf.start - at))
            parts.append(stacked)
            at = leaf.start + leaf.size
        if self.width > at:
            parts.append(parts[-1].new_zeros(len(parts[-1]), self.width - at))
        return torch.cat(parts, dim=1)

    def row(self, vector: Tensor) -> dict[str, Tensor]:
        """One member's leaves out of its row."""
        return {
            leaf.name: vector[leaf.start : leaf.start + leaf.size].view(leaf.shape) for leaf in self.leaves
        }


def make_layout(built: Built, idle: frozenset[str]) -> Layout:
    """The layout of a job's structure; `idle` leaves get no gradient and stay as they are."""
    names = {
        id(p): name for name, p in built.model.named_parameters() if p.requires_grad and name not in idle
    }
    update = UPDATES[type(built.optimizer)]
    spans: list[Span] = []
    at = 0
    for group in built.optimizer.param_groups:
        held = [(names[id(p)], tuple(p.shape)) for p in group["params"] if id(p) in names]
        leaves, stop = _placed(held, at)
        spans.append(Span(leaves, at, stop, update.slots(group), dict(update.structure(group))))
        at = stop
    dtype = next(p.dtype for p in built.model.parameters() if id(p) in names)
    return Layout(tuple(spans), update, at, dtype)


def _placed(held: Sequence[tuple[str, tuple[int, ...]]], at: int) -> tuple[tuple[Leaf, ...], int]:
    leaves = []
    for name, shape in held:
        leaf = Leaf(name, shape, at)
        leaves.append(leaf)
        at += -(-max(1, leaf.size) // _ALIGN) * _ALIGN
    return tuple(leaves), at
