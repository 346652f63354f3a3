"""Metrics that nobody waits for: kept as they came, in columns, and written into the members' histories all at once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import numpy as np

from carpool.adapters.base import EpochColumns, MetricColumns
from carpool.executors.member import Member

_MOST = 512  # entries before they are written


def epoch_means(columns: EpochColumns) -> dict[str, np.ndarray]:
    """By the names they have in a history: [epochs, rows]."""
    means = {name: total / max(1, columns.samples) for name, total in columns.sums.items()}
    return means | {f"val_{name}": found for name, found in columns.val_means.items()}


class Entry(NamedTuple):
    """What rows that go on as one showed in a chunk. `ends`: an epoch of all of them ended with it, and this is what validation gave."""

    shown: MetricColumns
    ends: bool
    validated: MetricColumns | None = None

    @property
    def val_means(self) -> dict[str, np.ndarray]:
        """By the names they have in a history."""
        if self.validated is None:
            return {}
        samples = np.maximum(1, self.validated.samples)
        return {f"val_{name}": total / samples for name, total in self.validated.sums.items()}


class Books:
    """Chunks and epochs that are read and not yet written down. Every number becomes what row by row it would have become."""

    def __init__(self) -> None:
        self._entries: list[Entry | EpochColumns] = []
        self._count = 0

    @property
    def is_full(self) -> bool:
        return self._count >= _MOST

    def add(self, entry: Entry | EpochColumns) -> None:
        """A chunk's metrics, or those of whole epochs, in order."""
        self._entries.append(entry)
        self._count += entry.epochs if isinstance(entry, EpochColumns) else 1

    def write(self, members: Mapping[int, Member]) -> None:
        """Brings the members up to date."""
        entries, self._entries, self._count = self._entries, [], 0
        for rows, alike in groupby(entries, _rows):
            _write(list(alike), [members[row] for row in rows])


def _rows(entry: Entry | EpochColumns) -> tuple[int, ...]:
    return entry.rows if isinstance(entry, EpochColumns) else entry.shown.rows


class _Column:
    """What some members have shown: of the epoch that is open, and the means of those that ended."""

    def __init__(self, members: list[Member]) -> None:
        names = {name: None for member in members for name in member.sums}
        self.sums = {name: np.array([one.sums.get(name, 0.0) for one in members]) for name in names}
        self.samples = np.array([member.samples for member in members], np.int64)
        self.steps = np.zeros(len(members), np.int64)
        self.ended, self.at_end = 0, self.steps
        self._nothing = np.zeros(len(members))
        self._epochs: dict[str, list[np.ndarray]] = {}

    def add(self, entry: Entry) -> None:
        shown = entry.shown
        self.steps = self.steps + shown.steps
        self.samples = self.samples + shown.samples
        for name, column in shown.sums.items():
            self.sums[name] = self.sums.get(name, self._nothing) + column
        if entry.ends:
            means = {name: total / np.maximum(1, self.samples) for name, total in self.sums.items()}
            self._end({name: column[None] for name, column in {**means, **entry.val_means}.items()}, 1)

    def add_epochs(self, columns: EpochColumns) -> None:
        """Of members that were about to begin one."""
        self.steps = self.steps + columns.epochs * columns.steps
        self._end(epoch_means(columns), columns.epochs)

    def _end(self, means: Mapping[str, np.ndarray], epochs: int) -> None:
        for name, column in means.items():
            self._epochs.setdefault(name, []).append(column)
        self.ended, self.at_end = self.ended + epochs, self.steps
        self.sums, self.samples = {}, np.zeros_like(self.samples)

    @property
    def histories(self) -> dict[str, list[list[float]]]:
        """The means of each epoch that ended, member by member."""
        return {name: np.concatenate(means).T.tolist() for name, means in self._epochs.items()}


def _write(entries: list[Entry | EpochColumns], members: list[Member]) -> None:
    """Entries of the same rows. An epoch may have begun before them, and the last may not have ended."""
    shown = _Column(members)
    for entry in entries:
        if isinstance(entry, EpochColumns):
            shown.add_epochs(entry)
        else:
            shown.add(entry)
    histories = shown.histories
    left = {name: column.tolist() for name, column in shown.sums.items()}
    columns = zip(members, shown.steps.tolist(), shown.at_end.tolist(), shown.samples.tolist(), strict=True)
    for place, (member, taken, taken_at_end, seen) in enumerate(columns):
        if shown.ended:
            member.steps_at_end = member.steps + taken_at_end
        member.steps += taken
        member.samples = seen
        member.sums = {name: column[place] for name, column in left.items()}
        member.epochs_ended += shown.ended
        for name, means in histories.items():
            member.history.setdefault(name, []).extend(means[place])
