"""Streams in a stack: the next batches lie where the arrays of a group that holds its data would lie.

So one traced step serves both: a row's order is its place in the window, and every chunk starts at its beginning. Rows that
read one source share one place, and the source is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.adapters.base import Unstackable
from carpool.adapters.torch.streams import Source, Streamed, supply_of
from carpool.data import Tap
from carpool.planning.cursor import Supply


class Window:
    """Room for a few batches of each source that the members of a stack read."""

    def __init__(self, members: Sequence[Streamed]) -> None:
        self._first = members[0]
        self._sources = list(dict.fromkeys(_source(member) for member in members))
        self._samples = members[0].length
        self._batches = max(source.capacity for source in self._sources)
        self._taps: dict[Source, Tap] = {}

    @property
    def length(self) -> int:
        """Samples of one source's place."""
        return self._samples * self._batches

    def shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and type of each of the window's arrays."""
        rows = self.length * len(self._sources)
        return tuple(((rows, *tensor.shape[1:]), tensor.dtype) for tensor in self._first.tensors)

    def arrays(self, device: str) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self.shapes())

    def open(self, epochs: int) -> None:
        self._taps = {source: source.tap(epochs) for source in self._sources}

    def positions(self, member: Streamed) -> Tensor:
        """Where in the window the member's batches lie."""
        start = self._sources.index(_source(member)) * self.length
        return torch.arange(start, start + self.length, dtype=torch.int32)

    def supply(self, member: Streamed) -> Supply | None:
        items = self._taps[_source(member)].ready()
        for item in items[:1]:
            self._check(item.batch)
        return supply_of(items[: self._batches])

    def depth(self, member: Streamed) -> tuple[int, int]:
        tap = self._taps[_source(member)]
        return tap.depth, tap.capacity

    def lay(self, members: Sequence[Streamed], steps: int, arrays: Sequence[Tensor]) -> None:
        """Copies the next batches of these members to their places; nothing is used up."""
        for source in dict.fromkeys(_source(member) for member in members):
            at = self._sources.index(source) * self.length
            for item in self._taps[source].ready()[:steps]:
                self._check(item.batch)
                item.batch.arrive()
                for array, leaf in zip(arrays, item.batch.leaves, strict=True):
                    array[at : at + item.batch.size].copy_(leaf, non_blocking=True)
                at += item.batch.size

    def take(self, members: Sequence[Streamed], steps: int) -> None:
        """These members' next batches are used up."""
        for source in dict.fromkeys(_source(member) for member in members):
            self._taps[source].take(steps)

    def _check(self, batch: Any) -> None:
        """A traced step knows the shapes of the first batch; a stack cannot go on with others."""
        wanted = [(tuple(t.shape[1:]), t.dtype) for t in self._first.tensors]
        found = [(tuple(t.shape[1:]), t.dtype) for t in batch.leaves]
        if wanted != found or batch.nest != self._first.nest or batch.size > self._samples:
            raise Unstackable(
                f"a batch has shapes {[tuple(t.shape) for t in batch.leaves]}, the first one had "
                f"{[tuple(t.shape) for t in self._first.tensors]}"
            )

    def close(self) -> None:
        for tap in self._taps.values():
            tap.close()


def _source(member: Streamed) -> Source:
    assert member.source is not None
    return member.source
