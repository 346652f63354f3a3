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

from carpool.adapters.torch.build import Built, LivePhase
from carpool.kernels.updates import UPDATES, Update

_ALIGN = 64  # elements: keeps every leaf's first address on a 128-byte line from 16-bit types up


@dataclass(frozen=True)
class Leaf:
    """A trainable leaf: its columns in the matrix."""

    name: str
    shape: tuple[int, ...]
    start: int
    key: str
    """What its optimizer slots are called in a `JobState`."""

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Span:
    """A parameter group: its leaves, its columns, the options that its members share, its phase's place in the step."""

    leaves: tuple[Leaf, ...]
    start: int
    stop: int
    slots: tuple[str, ...]
    options: Mapping[str, Any]
    update: Update
    phase: int
    num_columns: int
    """How many scalars its update reads."""


@dataclass(frozen=True)
class Layout:
    """The columns of a structure's matrix."""

    spans: tuple[Span, ...]
    width: int
    dtype: torch.dtype

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaf for span in self.spans for leaf in span.leaves)

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot for span in self.spans for slot in span.slots))

    @property
    def tallies(self) -> dict[str, list[float]]:
        """For each tally its value before the first update, group by group; zero where a group has none such."""
        names = dict.fromkeys(name for span in self.spans for name, _ in span.update.tallies)
        return {name: [dict(span.update.tallies).get(name, 0.0) for span in self.spans] for name in names}

    @property
    def hypers(self) -> int:
        """The most hyper-parameters that a group has."""
        return max(len(span.update.hypers) for span in self.spans)

    def spans_of(self, phase: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.phase == phase)

    def names_of(self, phase: int) -> frozenset[str]:
        """The leaves that a phase updates."""
        return frozenset(leaf.name for span in self.spans_of(phase) for leaf in span.leaves)

    def views(self, matrix: Tensor) -> dict[str, Tensor]:
        """Each leaf as a view of the matrix, members first."""
        rows = matrix.shape[0]
        return {
            leaf.name: matrix[:, leaf.start : leaf.start + leaf.size].view(rows, *leaf.shape)
            for leaf in self.leaves
        }

    def flat(self, leaves: Mapping[str, Tensor], phase: int | None = None) -> Tensor:
        """Stacked leaves, or those of a phase, as one matrix; the gaps between them are zeros."""
        spans = self.spans if phase is None else self.spans_of(phase)
        parts: list[Tensor] = []
        at, stop = spans[0].start, spans[-1].stop
        for leaf in (leaf for span in spans for leaf in span.leaves):
            stacked = leaves[leaf.name].reshape(-1, leaf.size)
            if leaf.start > at:
                parts.append(stacked.new_zeros(len(stacked), leaf.start - at))
            parts.append(stacked)
            at = leaf.start + leaf.size
        if stop > at:
            parts.append(parts[-1].new_zeros(len(parts[-1]), stop - at))
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
    spans: list[Span] = []
    at = 0
    for number, phase in enumerate(built.phases):
        update = UPDATES[type(phase.optimizer)]
        for group in phase.optimizer.param_groups:
            held = [(names[id(p)], tuple(p.shape)) for p in group["params"] if id(p) in names]
            leaves, stop = _placed(held, at, phase)
            slots, options, columns = update.slots(group), dict(update.structure(group)), _num_columns(update)
            spans.append(Span(leaves, at, stop, slots, options, update, number, columns))
            at = stop
    dtype = next(p.dtype for p in built.model.parameters() if id(p) in names)
    return Layout(tuple(spans), at, dtype)


def _num_columns(update: Update) -> int:
    one = torch.ones(1)
    return len(update.scalars(dict.fromkeys(update.hypers, one), one))


def _placed(
    held: Sequence[tuple[str, tuple[int, ...]]], at: int, phase: LivePhase
) -> tuple[tuple[Leaf, ...], int]:
    leaves = []
    for name, shape in held:
        leaf = Leaf(name, shape, at, phase.key(name))
        leaves.append(leaf)
        at += -(-max(1, leaf.size) // _ALIGN) * _ALIGN
    return tuple(leaves), at
