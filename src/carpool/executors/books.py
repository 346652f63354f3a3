"""Metrics that nobody waits for: kept as they came, in columns, and written into the members' histories all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from carpool.adapters.base import MetricColumns
from carpool.executors.member import Member

_MOST = 512  # entries before they are written


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
    """Chunks that are read and not yet written down. Every number becomes what row by row it would have become."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= _MOST

    def add(self, entry: Entry) -> None:
        """A chunk's metrics, in order."""
        self._entries.append(entry)

    def write(self, members: Mapping[int, Member]) -> None:
        """Brings the members up to date."""
        entries, self._entries = self._entries, []
        start = 0
        while start < len(entries):
            rows = entries[start].shown.rows
            stop = start
            while stop < len(entries) and entries[stop].shown.rows == rows:
                stop += 1
            _write(entries[start:stop], [members[row] for row in rows])
            start = stop


def _write(entries: list[Entry], members: list[Member]) -> None:
    """Entries of the same rows. An epoch may have begun before them, and the last may not have ended."""
    names = list(dict.fromkeys([name for m in members[:1] for name in m.sums] + list(entries[0].shown.sums)))
    samples = np.array([member.samples for member in members], np.int64)
    sums = {name: np.array([member.sums.get(name, 0.0) for member in members]) for name in names}
    steps = np.zeros(len(members), np.int64)
    epochs: dict[str, list[np.ndarray]] = {name: [] for name in names}
    ended, at_end = 0, steps
    for entry in entries:
        shown = entry.shown
        steps += shown.steps
        samples += shown.samples
        for name in names:
            sums[name] = sums[name] + shown.sums[name]
        if entry.ends:
            ended, at_end = ended + 1, steps.copy()
            for name in names:
                epochs[name].append(sums[name] / np.maximum(1, samples))
                sums[name] = np.zeros(len(members))
            for name, means in entry.val_means.items():
                epochs.setdefault(name, []).append(means)
            samples = np.zeros(len(members), np.int64)
    histories = {name: np.stack(means, 1).tolist() for name, means in epochs.items() if means}
    left = {name: column.tolist() for name, column in sums.items()}
    is_open = bool(samples.any())
    columns = zip(members, steps.tolist(), at_end.tolist(), samples.tolist(), strict=True)
    for place, (member, taken, taken_at_end, seen) in enumerate(columns):
        if ended:
            member.steps_at_end = member.steps + taken_at_end
        member.steps += taken
        member.samples = seen
        member.sums = {name: column[place] for name, column in left.items()} if is_open else {}
        member.epochs_ended += ended
        for name, means in histories.items():
            member.history.setdefault(name, []).extend(means[place])
