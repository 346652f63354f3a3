"""Where each row stands and what the next launch runs: epochs belong to the driver, and this is its arithmetic.

A launch has one batch shape, because padding a batch would move BatchNorm's statistics. Rows that want another shape
sit it out. A chunk is a run of launches with one shape and one set of rows, and never crosses an epoch's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

Standing = tuple[tuple[int, int, int], ...]
"""Where rows stand beside one another: row, epochs ahead of the last, batch."""
Served = tuple[int, int]
"""A launch's batch size, and how many members it serves."""

MAX_CHUNK_STEPS = 256  # bounds the hyper-parameter tables of a chunk, and how long Ctrl-C waits
SLICE_S = (
    0.05  # how long a chunk should take while others wait: long beside what a chunk costs the host, 1 to 2 ms
)


class Supply(NamedTuple):
    """What a row can run next: `steps` batches of `size` samples. `ends`: its epoch ends with the last of them."""

    size: int
    steps: int
    ends: bool


class Course(NamedTuple):
    """What a row has to run: `epochs` passes over `length` samples in batches of `batch_size`.

    When `streamed`, batches come as they come: the session says what is there (`Session.supply`), and length and batch
    size are what is known of them beforehand, 0 for nothing.
    """

    length: int
    batch_size: int
    epochs: int
    streamed: bool = False

    @property
    def batches(self) -> int:
        """Batches in an epoch, the short last one included."""
        return -(-self.length // max(1, self.batch_size))

    @property
    def steps(self) -> int:
        return self.batches * self.epochs

    def size(self, batch: int) -> int:
        """How many samples the batch at this position has."""
        return min(self.batch_size, self.length - batch * self.batch_size)

    def alike(self, batch: int) -> int:
        """How many batches of the same size follow from this one within the epoch, itself included."""
        return self.length // self.batch_size - batch if self.size(batch) == self.batch_size else 1

    def supply(self, batch: int) -> Supply:
        """What can be run from this batch on, of data that is all there."""
        steps = self.alike(batch)
        return Supply(self.size(batch), steps, batch + steps == self.batches)


class Cursor(NamedTuple):
    """The next batch a row will run, and the steps it has taken in all."""

    epoch: int = 0
    batch: int = 0
    step: int = 0

    def advanced(self, steps: int, ended: bool) -> Cursor:
        """The cursor after `steps` more batches; `ended` when the epoch ended with them."""
        if ended:
            return Cursor(self.epoch + 1, 0, self.step + steps)
        return Cursor(self.epoch, self.batch + steps, self.step + steps)


@dataclass(frozen=True)
class Chunk:
    """`steps` launches of `size` samples for these rows, each from its own cursor; rows in `ends` end an epoch."""

    rows: tuple[int, ...]
    cursors: tuple[Cursor, ...]
    size: int
    steps: int
    ends: tuple[int, ...] = ()

    def shortened(self, steps: int) -> Chunk:
        """The chunk's first so many steps, which end no epoch."""
        return self if steps == self.steps else Chunk(self.rows, self.cursors, self.size, steps)

    def of(self, rows: Collection[int]) -> Chunk:
        """The chunk of these rows alone."""
        kept = [(row, cursor) for row, cursor in zip(self.rows, self.cursors, strict=True) if row in rows]
        ends = tuple(row for row in self.ends if row in rows)
        return Chunk(
            tuple(row for row, _ in kept), tuple(cursor for _, cursor in kept), self.size, self.steps, ends
        )


@dataclass(frozen=True)
class Stretch:
    """Whole epochs of rows that stand in one place, with nothing decided between them: these chunks, the first epoch's, so often."""

    chunks: tuple[Chunk, ...]
    epochs: int
    validates: bool

    @property
    def rows(self) -> tuple[int, ...]:
        return self.chunks[0].rows

    @property
    def cursor(self) -> Cursor:
        """Where its rows begin."""
        return self.chunks[0].cursors[0]

    @property
    def steps(self) -> int:
        """Of a row, in an epoch."""
        return sum(chunk.steps for chunk in self.chunks)

    @property
    def samples(self) -> int:
        """Of a row, in an epoch."""
        return sum(chunk.steps * chunk.size for chunk in self.chunks)

    @property
    def end(self) -> Cursor:
        """Where its rows stand behind it."""
        return Cursor(self.cursor.epoch + self.epochs, 0, self.cursor.step + self.epochs * self.steps)

    def of(self, epochs: int) -> Stretch:
        """The first so many of its epochs."""
        return replace(self, epochs=epochs)

    def chunk(self, epoch: int, place: int) -> Chunk:
        """The chunk at this place in one of its epochs, counted from its first."""
        first = self.chunks[place]
        cursor = first.cursors[0]
        stands = Cursor(cursor.epoch + epoch, cursor.batch, cursor.step + epoch * self.steps)
        return replace(first, cursors=(stands,) * len(first.rows))


def stretch(
    rows: tuple[int, ...], course: Course, cursor: Cursor, epochs: int, validates: bool
) -> Stretch | None:
    """So many whole epochs of rows that are about to begin one, as long as these are not their last; None where there are none.

    >>> found = stretch((0, 1), Course(10, 4, 9), Cursor(2, 0, 6), 3, validates=False)
    >>> [(chunk.size, chunk.steps) for chunk in found.chunks], found.end
    ([(4, 2), (2, 1)], Cursor(epoch=5, batch=0, step=15))
    """
    epochs = min(epochs, course.epochs - 1 - cursor.epoch)
    if epochs < 1 or cursor.batch or course.streamed or not course.length:
        return None
    chunks: list[Chunk] = []
    while not chunks or not chunks[-1].ends:
        size, most, ends = course.supply(cursor.batch)
        steps = min(most, MAX_CHUNK_STEPS)
        is_last = ends and steps == most
        chunks.append(Chunk(rows, (cursor,) * len(rows), size, steps, rows if is_last else ()))
        cursor = cursor.advanced(steps, is_last)
    return Stretch(tuple(chunks), epochs, validates)


def most_steps(launch_s: float, slice_s: float | None) -> int:
    """How many steps a chunk may have: as many as fit the slice, where there is one and a launch's time is known.

    >>> most_steps(0.002, slice_s=0.05), most_steps(0.2, slice_s=0.05), most_steps(0.2, None), most_steps(0.0, 0.05)
    (25, 1, 256, 256)
    """
    if slice_s is None or not launch_s:
        return MAX_CHUNK_STEPS
    return min(MAX_CHUNK_STEPS, max(1, int(slice_s / launch_s)))


def supplies(courses: Mapping[int, Course], cursors: Mapping[int, Cursor]) -> dict[int, Supply]:
    """What each row that has not ended can run next, of data that is all there."""
    return {
        row: course.supply(cursors[row].batch)
        for row, course in courses.items()
        if cursors[row].epoch < course.epochs and course.length
    }


def cut(supplied: Mapping[int, Supply], cursors: Mapping[int, Cursor], max_steps: int) -> Chunk | None:
    """The next chunk for the rows that have something to run, or None when there are none.

    The rows furthest behind in epochs decide the shape, full batches before tails, so that rows of unequal
    length stay together epoch by epoch.

    >>> cut({0: Supply(4, 2, ends=False), 1: Supply(4, 2, ends=True)}, {0: Cursor(), 1: Cursor()}, max_steps=100)
    Chunk(rows=(0, 1), cursors=(Cursor(epoch=0, batch=0, step=0), Cursor(epoch=0, batch=0, step=0)), size=4, steps=2, ends=(1,))
    """
    if not supplied:
        return None
    behind = min(cursors[row].epoch for row in supplied)
    size = max(supply.size for row, supply in supplied.items() if cursors[row].epoch == behind)
    rows = tuple(row for row, supply in supplied.items() if supply.size == size)
    steps = min(max_steps, *(supplied[row].steps for row in rows))
    ends = tuple(row for row in rows if supplied[row].ends and supplied[row].steps == steps)
    return Chunk(rows, tuple(cursors[row] for row in rows), size, steps, ends)


@dataclass(frozen=True)
class Launches:
    """What a group will launch: launches by batch size, and how many member-steps of them are useful."""

    by_size: Mapping[int, int]
    useful: int
    launched: int


def launches(courses: Sequence[Course]) -> Launches:
    """Counts the launches of a group that runs to its end, by the driver's own rule.

    >>> launches([Course(10, 4, 2), Course(8, 4, 2)])
    Launches(by_size={4: 4, 2: 2}, useful=10, launched=12)
    """
    kinds = Counter(courses)  # equal rows move together: a sweep of thousands is a handful of kinds
    indexed = dict(enumerate(kinds))
    cursors = dict.fromkeys(indexed, Cursor())
    counted: Counter[Served] = Counter()
    seen: dict[Standing, tuple[int, Counter[Served]]] = {}
    while chunk := cut(there := supplies(indexed, cursors), cursors, max_steps=1 << 30):
        if cursors[next(iter(there))].batch == 0:  # where one of them begins an epoch is often enough to look
            behind = min(cursors[row].epoch for row in there)
            standing = tuple((row, cursors[row].epoch - behind, cursors[row].batch) for row in there)
            if standing in seen:  # as so many epochs ago: so it goes on, as long as nobody is near its end
                before, then = seen[standing]
                period = behind - before
                times = min((indexed[row].epochs - cursors[row].epoch - 1) // period for row in there)
                for served in counted:
                    counted[served] += times * (counted[served] - then[served])
                for row in there:
                    cursors[row] = cursors[row]._replace(epoch=cursors[row].epoch + times * period)
                seen.clear()
                continue
            seen[standing] = (behind, counted.copy())
        counted[chunk.size, sum(kinds[indexed[row]] for row in chunk.rows)] += chunk.steps
        for row in chunk.rows:
            cursors[row] = cursors[row].advanced(chunk.steps, row in chunk.ends)
    by_size: dict[int, int] = {}
    for (size, _), steps in counted.items():
        by_size[size] = by_size.get(size, 0) + steps
    useful = sum(members * steps for (_, members), steps in counted.items())
    return Launches(by_size, useful, sum(by_size.values()) * len(courses))
