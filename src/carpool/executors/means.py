"""The means of epochs as they end, of thousands of members at once: for who hears of them together (`EpochsEnded`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from carpool.adapters.base import EpochColumns
from carpool.events import EpochsEnded
from carpool.executors.books import Entry, epoch_means
from carpool.executors.member import Member


class Means:
    """What the open epochs of all rows have shown so far. Every number becomes what the members' histories will hold."""

    def __init__(self, members: Mapping[int, Member]) -> None:
        """Members whose books are written."""
        size = max(members, default=-1) + 1
        self._names = {row: member.name for row, member in members.items()}
        self._samples, self._epochs = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._sums: dict[str, np.ndarray] = {}
        self._rows: tuple[int, ...] = ()
        self._told: tuple[str, ...] = ()
        self._index = np.zeros(0, np.intp)
        for row, member in members.items():
            self._samples[row], self._epochs[row] = member.samples, member.epochs_ended
            for name, value in member.sums.items():
                self._column(name)[row] = value

    def add(self, entry: Entry) -> EpochsEnded | None:
        """A chunk's metrics, in order; the event, where an epoch of all its rows ended with it."""
        shown = entry.shown
        index = self._place(shown.rows)
        self._samples[index] += shown.samples
        for name, column in shown.sums.items():
            self._column(name)[index] += column
        if not entry.ends:
            return None
        samples = np.maximum(1, self._samples[index])
        metrics = {name: column[index] / samples for name, column in self._sums.items()}
        ended = EpochsEnded(self._told, self._epochs[index], {**metrics, **entry.val_means})
        for column in (self._samples, *self._sums.values()):
            column[index] = 0
        self._epochs[index] += 1
        return ended

    def add_epochs(self, columns: EpochColumns) -> Iterator[EpochsEnded]:
        """The events of whole epochs, which these rows were about to begin."""
        index, means = self._place(columns.rows), epoch_means(columns)
        for epoch in range(columns.epochs):
            own = {name: column[epoch] for name, column in means.items()}
            yield EpochsEnded(self._told, self._epochs[index], own)
            self._epochs[index] += 1

    def _place(self, rows: tuple[int, ...]) -> np.ndarray:
        """The rows as an index; most often they are those of the chunk before."""
        if rows is not self._rows:
            self._rows, self._index = rows, np.array(rows, np.intp)
            self._told = tuple(self._names[row] for row in rows)
        return self._index

    def _column(self, name: str) -> np.ndarray:
        return self._sums.setdefault(name, np.zeros(len(self._samples)))
