"""Streams in a stack: the next batches lie where the arrays of a group that holds its data would lie.

So one traced step serves both: a row's order is its place in the window, and every chunk starts at its beginning. Rows that
read one source share one place, and the source is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.adapters.base import Unstackable
from carpool.adapters.torch.build import Arrays, Built
from carpool.adapters.torch.streams import Source, Streamed, supply_of
from carpool.data import Tap
from carpool.errors import failure
from carpool.planning.cursor import Supply


class Window:
    """Room for a few batches of each source that the members of a stack read."""

    def __init__(self, members: Sequence[Streamed]) -> None:
        self._first = members[0]
        self._sources = list(dict.fromkeys(_source(member) for member in members))
        self._samples = max(member.length for member in members)
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

    def open(self, jobs: Sequence[Built]) -> None:
        """Begins to read: each source for as many epochs as the longest of its jobs has."""
        for source in self._sources:
            epochs = [built.job.epochs for built in jobs if _source(built.data) is source]
            self._taps[source] = source.tap(max(epochs))

    def keep(self, members: Sequence[Arrays]) -> None:
        """Only these still read; a source that nobody reads any more holds up nobody elsewhere."""
        read = {_source(member) for member in members}
        for source in [source for source in self._taps if source not in read]:
            self._taps.pop(source).close()

    def positions(self, member: Streamed) -> Tensor:
        """Where in the window the member's batches lie."""
        start = self._sources.index(_source(member)) * self.length
        return torch.arange(start, start + self.length, dtype=torch.int32)

    def supply(self, members: Mapping[int, Streamed]) -> dict[int, Supply | BaseException]:
        """What each row can run now. Each source is asked once: what comes between two rows is for neither of them."""
        sources = {source: self._asked(source) for source in {_source(member) for member in members.values()}}
        answers = {row: sources[_source(member)] for row, member in members.items()}
        return {row: answer for row, answer in answers.items() if answer is not None}

    def _asked(self, source: Source) -> Supply | BaseException | None:
        try:
            items = self._taps[source].ready()
        except BaseException as error:
            failure(error)
            return error
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
        self.keep([])


def _source(member: Arrays) -> Source:
    assert isinstance(member, Streamed)
    assert member.source is not None
    return member.source
