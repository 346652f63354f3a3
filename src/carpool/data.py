"""Batches that come from somewhere: read ahead in the background, bounded, and always stopped.

A `Reader` is one thread that reads passes (epochs) of batches ahead of those who take them, its taps: a source that
several jobs name is read once. The order never depends on timing. `Queue` is the public face: batches made by functions.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from carpool.ambient import Reading, aside
from carpool.arguments import Arguments
from carpool.errors import DataError, sentence

_MOST_AHEAD = 1 << 20  # batches that are held at once
_MOST_WORKERS = 1 << 10  # each is a thread
_STOP_S = 5.0  # how long a source that is in the middle of a batch may take to come back


@dataclass(frozen=True)
class Item:
    """A batch, and whether it is the last of its pass."""

    batch: Any
    last: bool


_END: Any = object()


class _Stopped(Exception):
    """Nobody takes batches any more."""


class Reader:
    """Reads `passes(0)`, `passes(1)`, ... in a thread, as many as its taps want, at most `capacity` batches ahead.

    `prepare` is applied to each batch in the thread. What a pass raises reaches every tap, after the batches before it.
    """

    def __init__(
        self,
        passes: Callable[[int], Iterable[Any]],
        capacity: int,
        prepare: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        says = Arguments(DataError)
        self.capacity = says.whole("capacity", capacity, "pass capacity=1 or more", 1, _MOST_AHEAD)
        self._passes = says.function("passes", passes, "pass a function of an epoch's number")
        self._prepare = says.function("prepare", prepare)
        self._reading = Reading()
        self._items: deque[Item] = deque()
        self._base = 0  # the number of the first item held
        self._taps: list[Tap] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self.shared = False
        self._thread: threading.Thread | None = None

    @property
    def fresh(self) -> bool:
        """Whether a tap made now would see every batch."""
        return self._base == 0 and not self._stopped

    def tap(self, epochs: int) -> Tap:
        """Someone who takes so many passes, from the first batch on."""
        if not self.fresh:
            raise ValueError("batches have been taken already; open another reader")
        made = Tap(self, epochs)
        with self._changed:
            self.shared |= bool(self._taps)
            self._taps.append(made)
            self._changed.notify_all()
        self._start()
        return made

    def first(self) -> Item:
        """The first batch, waiting for it; taps made later see it too."""
        self._start()
        return self.wait_for(0)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="carpool reader", daemon=True)
            self._thread.start()

    # In the thread

    def _read(self) -> None:
        epoch = 0
        try:
            while self._is_wanted(epoch):
                self._read_pass(epoch)
                epoch += 1
        except _Stopped:
            pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _is_wanted(self, epoch: int) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or epoch == 0 or any(tap.epochs > epoch for tap in self._taps)
            )
            return not self._stopped

    def _read_pass(self, epoch: int) -> None:
        """One batch is held back until it is known whether another follows."""
        with self._reading.batch(begins=True):
            source = iter(self._passes(epoch))
            batch = next(source, _END)
        held: list[Any] = []
        try:
            try:
                while batch is not _END:
                    if held:
                        self._push(Item(held.pop(), last=False))
                    held.append(self._prepare(batch))
                    with self._reading.batch():
                        batch = next(source, _END)
            except BaseException:  # what was read before it counts
                if held:
                    self._push(Item(held.pop(), last=False))
                raise
            if not held:
                raise DataError(
                    sentence(
                        "at least one batch an epoch",
                        f"none in epoch {epoch}",
                        "pass data that can be read again: a loader, or a function that makes an iterator",
                    )
                )
            self._push(Item(held.pop(), last=True))
        finally:
            if (close := getattr(source, "close", None)) is not None:
                close()

    def _push(self, item: Item) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._items) < self.capacity)
            if self._stopped:
                raise _Stopped
            self._items.append(item)
            self._changed.notify_all()

    # For taps

    def ready_from(self, number: int) -> tuple[Item, ...]:
        with self._changed:
            found = tuple(self._items)[number - self._base :]
            if not found and self._error is not None:
                raise self._error
            return found

    def depth_from(self, number: int) -> int:
        with self._changed:
            return max(0, len(self._items) - (number - self._base))

    def wait_for(self, number: int) -> Item:
        with aside(), self._changed:  # the source draws, maybe
            self._changed.wait_for(
                lambda: len(self._items) > number - self._base or self._error is not None or self._stopped
            )
        return self.ready_from(number)[0]

    def trim(self) -> None:
        """Drops what every tap has taken."""
        with self._changed:
            least = min((tap.taken for tap in self._taps), default=self._base)
            while self._base < least:
                self._items.popleft()
                self._base += 1
            self._changed.notify_all()

    def leave(self, tap: Tap) -> None:
        with self._changed:
            self._taps = [other for other in self._taps if other is not tap]
        if self._taps:
            self.trim()
        elif self._base:  # with nothing taken, whoever comes next finds every batch
            self.stop()

    def stop(self) -> None:
        """Stops the thread and waits for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            with aside():  # it may be waiting for its turn
                self._thread.join(_STOP_S)
            if self._thread.is_alive():
                warnings.warn(
                    f"carpool: a data source did not return within {_STOP_S:.0f} s of being stopped; its thread is left to end by itself",
                    stacklevel=2,
                )
        self._items.clear()


class Tap:
    """One taker of a reader's batches."""

    def __init__(self, reader: Reader, epochs: int) -> None:
        self._reader = reader
        self.epochs = epochs
        self.taken = 0

    @property
    def capacity(self) -> int:
        return self._reader.capacity

    @property
    def shared(self) -> bool:
        """Whether others take the same batches, or did."""
        return self._reader.shared

    @property
    def depth(self) -> int:
        """How many batches are there."""
        return self._reader.depth_from(self.taken)

    def ready(self) -> tuple[Item, ...]:
        """The batches that are there, oldest first. Raises what the source raised once there are none before it."""
        return self._reader.ready_from(self.taken)

    def wait(self) -> Item:
        """The next batch, waiting for it; it is not taken."""
        return self._reader.wait_for(self.taken)

    def take(self, count: int) -> None:
        """These are used up."""
        self.taken += count
        self._reader.trim()

    def close(self) -> None:
        self._reader.leave(self)


class Queue:
    """Batches that functions make in background threads, at most `capacity` ahead of the job.

    Each of the `workers` calls `source(worker)` once an epoch and runs through what it returns; batches are taken from
    the workers in turn, so their order does not depend on timing. What a worker raises is the job's failure.

    >>> queue = Queue(lambda worker: ([worker, i] for i in range(2)), capacity=4, workers=2)
    >>> list(queue)
    [[0, 0], [1, 0], [0, 1], [1, 1]]
    """

    def __init__(
        self, source: Callable[[int], Iterable[Any]], *, capacity: int = 8, workers: int = 1
    ) -> None:
        if not callable(source):
            raise DataError(
                sentence(
                    "a function of a worker's number that returns batches",
                    type(source).__name__,
                    "pass lambda worker: my_batches()",
                )
            )
        says = Arguments(DataError)
        self._source = source
        self.capacity = says.whole("capacity", capacity, "pass capacity=1 or more", 1, _MOST_AHEAD)
        self.workers = says.whole("workers", workers, "pass workers=1 or more", 1, _MOST_WORKERS)

    def __iter__(self) -> Iterator[Any]:
        if self.workers == 1:
            yield from self._source(0)
            return
        ahead = max(1, self.capacity // self.workers)
        readers = [Reader(self._pass_of(worker), ahead) for worker in range(self.workers)]
        live = [reader.tap(epochs=1) for reader in readers]
        try:
            while live:
                for tap in tuple(live):
                    item = tap.wait()
                    tap.take(1)
                    if item.last:
                        live.remove(tap)
                    else:
                        yield item.batch
        finally:
            for reader in readers:
                reader.stop()

    def _pass_of(self, worker: int) -> Callable[[int], Iterable[Any]]:
        def one(epoch: int) -> Iterator[Any]:
            yield from self._source(worker)
            yield None  # the end, so that a worker without batches has one item too

        return one
