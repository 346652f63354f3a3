"""What steps of machine code showed: of a chunk, of a validation, of whole epochs that were told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from carpool.adapters.base import EpochColumns, MetricColumns, Reading, Ticket
from carpool.adapters.torch.hypers import Ahead
from carpool.adapters.torch.standing import Rows
from carpool.planning.cursor import Stretch


@dataclass
class Shown:
    """What steps give, epoch after epoch: sums by row, how many steps each took, and where it raised; once their launch is through."""

    begin: Callable[[], None]
    """Begins all that was told, this among it."""
    steps: int
    sums: np.ndarray
    """[epochs, rows, values]"""
    taken: np.ndarray
    faults: np.ndarray
    future: Future[None] | None = None
    seconds: float = 0.0
    """Its share of the launch's."""

    @classmethod
    def room(cls, begin: Callable[[], None], width: int, steps: int, values: int, count: int = 1) -> Shown:
        """For so many epochs of so many steps each, of a stack of so many rows."""
        taken, faults = np.zeros((count, width), np.int64), np.full((count, width), -1, np.int64)
        return cls(begin, steps, np.zeros((count, width, values)), taken, faults)

    def done(self) -> bool:
        return self._launched().done()

    def wait(self) -> None:
        self._launched().result()

    def _launched(self) -> Future[None]:
        if self.future is None:
            self.begin()
        assert self.future is not None
        return self.future

    def read(self) -> np.ndarray:
        """A row for each of the stack's, of a single epoch: sums, steps taken, and whether it is alive."""
        self.wait()
        taken = self.taken[0]
        alive = (taken == self.steps) | (self.faults[0] >= 0)
        return np.concatenate([self.sums[0], taken[:, None], alive[:, None]], 1)

    def at(self, epoch: int) -> Shown:
        """What one of the epochs gave."""
        own = slice(epoch, epoch + 1)
        parts = self.sums[own], self.taken[own], self.faults[own]
        return Shown(self.begin, self.steps, *parts, self.future)

    def whole(self, rows: Rows) -> bool:
        """Whether these rows took all their steps."""
        return bool((self.taken[:, rows.place] == self.steps).all())


@dataclass(frozen=True)
class Validated:
    """The sums of rows over all their validation samples."""

    shown: Shown
    lengths: Mapping[int, int]
    names: Sequence[str]

    def done(self) -> bool:
        return self.shown.done()

    def read(self) -> MetricColumns:
        rows = tuple(self.lengths)
        sums = self.shown.read()[list(rows)]
        samples = np.array(list(self.lengths.values()), np.int64)
        nothing = np.zeros(len(rows), bool)
        own = {name: sums[:, column] for column, name in enumerate(self.names)}
        return MetricColumns(rows, np.zeros(len(rows), np.int64), samples, own, nothing)


@dataclass(frozen=True)
class Stretched:
    """Whole epochs that were told at once: what their chunks showed, and their validation."""

    stretch: Stretch
    rows: Rows
    chunks: Sequence[Shown]
    validated: Validated | None
    ahead: Ahead
    names: Sequence[str]

    def done(self) -> bool:
        return self.chunks[0].done()

    def columns(self) -> EpochColumns | None:
        for shown in self.chunks:
            shown.wait()
        if not all(shown.whole(self.rows) for shown in self.chunks):
            return None
        total = self.chunks[0].sums[:, self.rows.place]
        for shown in self.chunks[1:]:
            total = total + shown.sums[:, self.rows.place]
        told, steps = self.stretch, self.stretch.steps
        sums = {name: total[:, :, column] for column, name in enumerate(self.names)}
        return EpochColumns(told.rows, told.epochs, steps, told.samples, sums, self._validation())

    def _validation(self) -> Mapping[str, np.ndarray]:
        if self.validated is None:
            return {}
        shown, lengths = self.validated.shown, self.validated.lengths
        samples = np.maximum(1, np.array([lengths[row] for row in self.stretch.rows], np.int64))
        means = shown.sums[:, self.rows.place] / samples[:, None]
        return {name: means[:, :, column] for column, name in enumerate(self.validated.names)}

    def tickets(self) -> Iterator[tuple[Ticket, Reading | None]]:
        for epoch in range(self.stretch.epochs):
            begun = epoch * self.stretch.steps
            for place, shown in enumerate(self.chunks):
                chunk = self.stretch.chunk(epoch, place)
                ahead = replace(self.ahead, begun=begun)
                begun += chunk.steps
                read = self.validated if chunk.ends else None
                if read is not None:
                    read = replace(read, shown=read.shown.at(epoch))
                yield Ticket(chunk, (shown.at(epoch), ahead, None)), read

    @property
    def seconds(self) -> float:
        """Of all its steps; validation is left out, as it is of single chunks."""
        return sum(shown.seconds for shown in self.chunks)
