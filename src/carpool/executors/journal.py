"""What members show while nobody has to look at each of them: booked in columns, and told together to those who hear of it so."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.adapters.base import EpochColumns
from carpool.events import Emit, EpochsEnded, hears
from carpool.executors.books import Books, Entry
from carpool.executors.means import Means
from carpool.executors.member import Member


class Journal:
    """The books of a session's members, and the means of their epochs for whoever hears of epochs together."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._books = Books()
        self._means: Means | None = None

    def add(self, entry: Entry, members: Mapping[int, Member]) -> None:
        """A chunk's metrics, in order."""
        if hears(self._emit, EpochsEnded):
            self._means = self._means or Means(members)
            if (ended := self._means.add(entry)) is not None:
                self._emit(ended)
        self._books.add(entry)
        if self._books.is_full:
            self.write(members)

    def add_epochs(self, columns: EpochColumns, members: Mapping[int, Member]) -> None:
        """What whole epochs showed, in order."""
        if hears(self._emit, EpochsEnded):
            self._means = self._means or Means(members)
            for ended in self._means.add_epochs(columns):
                self._emit(ended)
        self._books.add(columns)
        if self._books.is_full:
            self.write(members)

    def write(self, members: Mapping[int, Member]) -> None:
        """Brings the members' histories up to date."""
        self._books.write(members)
        self._means = None  # who is there, and what was shown, may change now
