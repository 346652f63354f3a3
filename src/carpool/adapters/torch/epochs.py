"""Many epochs in one launch of machine code: a stack's chunks and validations are gathered until somebody asks what they gave.

The driver tells chunk after chunk, and asks for none of them while nothing is decided. So what it tells is gathered, as much as
runs for 50 ms, and launched in a thread of its own while the driver tells more. What hangs on a chunk (its sums, how many steps
its rows took) is in memory of the launch's own, so nothing waits for anything but the members' weights.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.base import MetricColumns
from carpool.adapters.torch.feed import Feed
from carpool.adapters.torch.hypers import Ahead, columns
from carpool.adapters.torch.launch import SEGMENT, TENSOR, Memory, Resident, carry_out, entry, table_of
from carpool.adapters.torch.stacked import Recipe
from carpool.adapters.torch.standing import standing
from carpool.adapters.torch.validation import Validation
from carpool.planning.cursor import Chunk

Tensors = dict[str, Tensor]

LAUNCH_S = 0.05
"""How long a launch may be expected to take."""
_MOST_CHUNKS = 256


class _Runner:
    """The thread in which launches run, one after another; it is there while some stack may launch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._stacks = 0

    def open(self) -> None:
        with self._lock:
            self._stacks += 1

    def submit(self, work: Callable[[], None]) -> Future[None]:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "carpool-resident")
            return self._thread.submit(work)

    def close(self) -> None:
        """A stack launches no more."""
        with self._lock:
            self._stacks -= 1
            idle, self._thread = (self._thread, None) if not self._stacks else (None, self._thread)
        if idle is not None:
            idle.shutdown()


@cache
def _runner(process: int) -> _Runner:
    """A process's own: after a fork the parent's thread is not there."""
    return _Runner()


@dataclass(frozen=True)
class _Segment:
    """Some steps of some rows: where in their orders they begin, and the number of their first batch."""

    resident: Resident
    tensors: Mapping[str, Tensor]
    rows: np.ndarray
    order: Tensor
    first: np.ndarray
    batch: np.ndarray
    steps: int
    shown: Shown
    ahead: Ahead | None = None
    """What training updates with."""


@dataclass
class Shown:
    """What a chunk or a validation gives: sums by row, once its launch is through."""

    epochs: Epochs
    values: int
    steps: int
    future: Future[None] | None = None
    sums: np.ndarray = field(default_factory=lambda: np.zeros(0))
    taken: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    faults: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    seconds: float = 0.0
    """Its share of the launch's."""

    def done(self) -> bool:
        if self.future is None:
            self.epochs.launch()
        assert self.future is not None
        return self.future.done()

    def wait(self) -> None:
        if self.future is None:
            self.epochs.launch()
        assert self.future is not None
        self.future.result()

    def read(self) -> np.ndarray:
        """A row for each of the stack's: sums, steps taken, and whether it is alive."""
        self.wait()
        alive = (self.taken == self.steps) | (self.faults >= 0)
        return np.concatenate([self.sums, self.taken[:, None], alive[:, None]], 1)


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


class Epochs:
    """What a stack was told and has not begun, and the launches that are under way."""

    def __init__(self, recipe: Recipe, tensors: Tensors, feed: Feed, clip: Callable[[], Tensor]) -> None:
        self._recipe, self._tensors, self._feed, self._clip = recipe, tensors, feed, clip
        self.width = len(tensors["weights"])
        self._orders = feed.orders.moved(range(self.width), tensors["order"].clone())
        self._segments: list[_Segment] = []
        self._running: list[Future[None]] = []
        self._halted = np.zeros(self.width, np.uint8)
        self._counts: np.ndarray | None = None
        """How many updates each row's groups will have had when all that was told is through."""
        self._tables: dict[int, np.ndarray] = {}
        self._memory = Memory()
        self._expected_s = 0.0
        self._chunk_s = LAUNCH_S
        self._runner = _runner(os.getpid())
        self._runner.open()

    def close(self) -> None:
        """Computes what was told, and launches no more."""
        try:
            self.settle()
        finally:
            self._runner.close()

    @property
    def in_flight(self) -> int:
        """How many chunks may be told before the first is asked about: those of two launches."""
        return int(min(_MOST_CHUNKS, max(2.0, 3 * LAUNCH_S / max(self._chunk_s, 1e-6))))

    # Telling

    def train(self, chunk: Chunk, ahead: Ahead, resident: Resident) -> Shown:
        """The steps of a chunk."""
        rows, where = self._feed.rows(chunk), standing(chunk.cursors)
        if self._orders.begins(rows, where.epochs):
            self._orders.renew()  # what was told before reads the old one
            self._orders.lay(rows, where.epochs)
        order = self._orders.order
        starts = np.broadcast_to(where.batches * self._feed.batch_size, len(rows.host))
        first = starts + (rows.host * order.shape[1] if len(order) > 1 else 0)
        batch = np.broadcast_to(where.batches, len(rows.host))
        shown = Shown(self, len(self._recipe.values), chunk.steps)
        self._add(
            _Segment(resident, self._tensors, rows.host, order, first, batch, chunk.steps, shown, ahead)
        )
        return shown

    def validate(
        self,
        rows: Sequence[int],
        size: int,
        validation: Validation,
        resident: Callable[[int], Resident | None],
    ) -> Validated | None:
        """All validation samples of these rows; None where a batch size has no machine code."""
        passes = validation.passes(rows, size)
        codes = {batch: resident(batch) for _, _, batch, _ in passes}
        if any(code is None for code in codes.values()):
            return None
        shown = Shown(self, len(self._recipe.evaluated), 0)
        order = validation.tensors["order"]
        for chosen, start, batch, steps in passes:
            own = np.array(chosen, np.int64)
            first = start + (own * order.shape[1] if len(order) > 1 else np.zeros_like(own))
            code = codes[batch]
            assert code is not None
            number = np.full_like(own, start // size)
            self._add(_Segment(code, validation.tensors, own, order, first, number, steps, shown))
        if not passes:
            shown.sums = np.zeros((self.width, shown.values))
            shown.future = Future()
            shown.future.set_result(None)
        return Validated(shown, validation.lengths(rows), self._recipe.evaluated)

    def _add(self, segment: _Segment) -> None:
        expected_s = segment.steps * segment.resident.step_s
        self._segments.append(segment)
        self._expected_s += expected_s
        if segment.ahead is not None:  # validation comes with the epoch that it follows
            self._chunk_s = expected_s
            if self._expected_s > LAUNCH_S:
                self.launch()

    # Launching

    def launch(self) -> None:
        """Begins all that was told."""
        if not self._segments:
            return
        segments, self._segments, self._expected_s = self._segments, [], 0.0
        if self._counts is None:
            self.wait()
            self._counts = self._tensors["updates"].numpy().copy()
        made = _Launch(self, segments, self._fed(segments))
        self._running = [future for future in self._running if not future.done()]
        future = self._runner.submit(made.carry_out)
        self._running.append(future)
        for segment in segments:
            segment.shown.future = future

    def settle(self) -> None:
        """Begins all that was told and waits for it: the stack's tensors hold what it gave."""
        self.launch()
        self.wait()
        self._counts = None

    def wait(self) -> None:
        for future in self._running:
            future.result()
        self._running = []

    def _fed(self, segments: Sequence[_Segment]) -> dict[str, np.ndarray]:
        """The tables of all training steps of a launch, one behind another: [rows, steps, ...]."""
        training = [(segment, segment.ahead) for segment in segments if segment.ahead is not None]
        if not training:
            return {}
        assert self._counts is not None
        due = np.concatenate([ahead.due for _, ahead in training])
        numbers = _joined([ahead for _, ahead in training])
        wide, space = self._tensors["table"].dtype, self._tensors["table"].shape[-1]
        table = columns(
            self._recipe.layout, numbers, torch.from_numpy(self._counts), torch.from_numpy(due), space
        )
        phases = [span.phase for span in self._recipe.layout.spans]
        self._counts = self._counts + due.sum(0)[:, phases]
        return {
            "table": table.transpose(0, 1).to(wide).contiguous().numpy(),
            "due": np.ascontiguousarray(due.transpose(1, 0, 2)).view(np.uint8),
            "clip": self._clip().to(wide).numpy(),
        }

    def table(self, segment: _Segment) -> np.ndarray:
        """Where a segment's code finds the tensors that stay where they are."""
        key = id(segment.resident)
        if key not in self._tables:
            self._tables[key] = table_of(segment.resident.code, segment.tensors)
        return self._tables[key]

    def stop(self, row: int) -> None:
        """The row raised, and takes no more steps of any kind."""
        self._tensors["alive"][row] = False

    @property
    def halted(self) -> np.ndarray:
        return self._halted

    @property
    def memory(self) -> Memory:
        return self._memory


def _joined(aheads: Sequence[Ahead]) -> np.ndarray:
    """The numbers of chunks, step by step; once where they are the same at all steps."""
    first = aheads[0].numbers
    if all(len(ahead.numbers) == 1 and np.array_equal(ahead.numbers, first) for ahead in aheads):
        return first
    return np.concatenate(
        [np.broadcast_to(ahead.numbers, (len(ahead.due), *ahead.numbers.shape[1:])) for ahead in aheads]
    )


class _Launch:
    """Segments in the form that machine code takes, and everything that it reads meanwhile."""

    def __init__(self, epochs: Epochs, segments: Sequence[_Segment], fed: Mapping[str, np.ndarray]) -> None:
        width, count = epochs.width, len(segments)
        self._epochs, self._segments, self._fed = epochs, segments, fed
        self._active = np.zeros((count, width), np.uint8)
        self._first = np.zeros((count, width), np.int64)
        self._batch = np.zeros((count, width), np.int64)
        self._faults = np.full((count, width), -1, np.int64)
        begins, step = [], 0
        for place, segment in enumerate(segments):
            begin = step if segment.ahead is not None else 0
            begins.append(begin)
            step += segment.steps if segment.ahead is not None else 0
            size = segment.resident.code.size
            self._active[place, segment.rows] = 1
            self._first[place, segment.rows] = segment.first - begin * size
            self._batch[place, segment.rows] = segment.batch - begin
            shown = segment.shown
            if not len(shown.sums):
                shown.sums, shown.taken = np.zeros((width, shown.values)), np.zeros(width, np.int64)
                shown.faults = np.full(width, -1, np.int64)
            if segment.ahead is not None:
                shown.faults = self._faults[place]
        self._rows = np.flatnonzero(self._active.any(0))
        self._tables = [self._table(place, segment) for place, segment in enumerate(segments)]
        self._made = np.array(
            [
                (
                    entry(segment.resident.library),
                    table.ctypes.data,
                    self._active[place].ctypes.data,
                    self._faults[place].ctypes.data,
                    begins[place],
                    segment.steps,
                    0,
                )
                for place, (segment, table) in enumerate(zip(segments, self._tables, strict=True))
            ],
            SEGMENT,
        )
        self._bytes = max(segment.resident.code.memory_bytes for segment in segments)
        self._expected_s = [max(1e-9, segment.steps * segment.resident.step_s) for segment in segments]

    def _table(self, place: int, segment: _Segment) -> np.ndarray:
        own: dict[str, Any] = {
            "first": self._first[place],
            "batch": self._batch[place],
            "sums": segment.shown.sums,
            "taken": segment.shown.taken,
            **(self._fed if segment.ahead is not None else {}),
        }
        table = self._epochs.table(segment).copy()
        for number, name in enumerate(segment.resident.code.tensors):
            if name == "order":
                table[number] = segment.order.data_ptr(), 0
            elif name in own:
                table[number] = own[name].ctypes.data, own[name].strides[0]
        assert table.dtype == TENSOR
        return table

    def carry_out(self) -> None:
        started = time.perf_counter()
        resident = self._segments[0].resident
        carry_out(
            resident.library, self._made, self._rows, self._epochs.halted, self._epochs.memory, self._bytes,
            resident.threads(),
        )  # fmt: skip
        for row in np.flatnonzero((self._faults >= 0).any(0)).tolist():
            self._epochs.stop(row)
        share = (time.perf_counter() - started) / sum(self._expected_s)
        for segment, expected_s in zip(self._segments, self._expected_s, strict=True):
            segment.shown.seconds += expected_s * share
