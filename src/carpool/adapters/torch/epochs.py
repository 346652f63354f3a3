"""Many epochs in one launch of machine code: a stack's chunks and validations are gathered until somebody asks what they gave.

The driver tells whole epochs at once, or chunk after chunk, and asks for none of them while nothing is decided. So what it tells
is gathered, as much as runs for 50 ms, and launched in a thread of its own while the driver tells more. What hangs on a chunk (its
sums, how many steps its rows took) is in memory of the launch's own, so nothing waits for anything but the members' weights.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.torch.feed import Feed
from carpool.adapters.torch.hypers import Ahead, columns
from carpool.adapters.torch.launch import (
    TENSOR,
    Memory,
    Resident,
    block_of,
    carry_out,
    orders_of,
    segment_of,
    table_of,
)
from carpool.adapters.torch.stacked import Recipe
from carpool.adapters.torch.standing import Rows, standing
from carpool.adapters.torch.told import Shown, Stretched, Validated
from carpool.adapters.torch.validation import Validation
from carpool.order import scratch_bytes
from carpool.planning.cursor import Chunk, Stretch

Tensors = dict[str, Tensor]

LAUNCH_S = 0.05
"""How long a launch may be expected to take."""
_MOST_CHUNKS = 256
_MOST_EPOCHS = 256
_MOST_SLOWER = 10.0


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
class _Part:
    """Steps of one kind in each epoch of a block: where in their orders the rows begin, and the number of their first batch."""

    resident: Resident
    tensors: Mapping[str, Tensor]
    rows: np.ndarray
    order: int
    """The address."""
    first: np.ndarray
    batch: np.ndarray
    steps: int
    shown: Shown
    trains: bool = False
    lays: np.ndarray | None = None
    """For each of the stack's rows the epoch whose order is laid out first, or -1."""

    @property
    def expected_s(self) -> float:
        """Seconds that it is expected to take in an epoch."""
        resident = self.resident
        return max(1e-9, self.steps * resident.step_s * len(self.rows) / resident.timed_rows)


@dataclass(frozen=True)
class _Block:
    """Parts that follow one another, so many times; `ahead` is what its training updates with."""

    parts: Sequence[_Part]
    epochs: int = 1
    ahead: Ahead | None = None

    @property
    def steps(self) -> int:
        """Of training, in an epoch."""
        return sum(part.steps for part in self.parts if part.trains)

    @property
    def expected_s(self) -> float:
        return self.epochs * sum(part.expected_s for part in self.parts)


class Epochs:
    """What a stack was told and has not begun, and the launches that are under way."""

    def __init__(self, recipe: Recipe, tensors: Tensors, feed: Feed, clip: Callable[[], Tensor]) -> None:
        self._recipe, self._tensors, self._feed, self._clip = recipe, tensors, feed, clip
        self.width, self.longest = len(tensors["weights"]), tensors["order"].shape[1]
        self._order = np.zeros((self.width, self.longest), np.int32)
        """Only launches write it, one after another: what they laid out last."""
        self._laid = np.full(self.width, -1, np.int64)
        """The epoch whose order will lie there when all that was told is through."""
        self._places = feed.orders.places
        self.orders = orders_of(self._order, self._places)
        self._blocks: list[_Block] = []
        self._running: list[Future[None]] = []
        self.halted = np.zeros(self.width, np.uint8)
        self._counts: np.ndarray | None = None
        """How many updates each row's groups will have had when all that was told is through."""
        self._tables: dict[tuple[int, int], np.ndarray] = {}
        self.memory = Memory()
        self._expected_s = 0.0
        self._told_s = LAUNCH_S
        self._slower = 1.0
        """How many times longer than expected the last launch took: the driver needs a core, too."""
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
        """How often it may be told before the first is asked about: as much as three launches take."""
        return int(min(_MOST_CHUNKS, max(2.0, 3 * LAUNCH_S / max(self._told_s, 1e-6))))

    # Telling

    def train(self, chunk: Chunk, ahead: Ahead, resident: Resident) -> Shown:
        """The steps of a chunk."""
        rows, where = self._feed.rows(chunk), standing(chunk.cursors)
        lays = np.full(self.width, -1, np.int64)
        lays[rows.place] = np.where(self._laid[rows.place] == where.epochs, -1, where.epochs)
        self._laid[rows.place] = where.epochs
        part = self._training(chunk, rows, resident, where.batches, lays)
        self._add(_Block([part], 1, ahead))
        return part.shown

    def validate(
        self,
        rows: Sequence[int],
        size: int,
        validation: Validation,
        resident: Callable[[int], Resident | None],
    ) -> Validated | None:
        """All validation samples of these rows; None where a batch size has no machine code."""
        parts = self._validating(rows, size, validation, resident)
        if parts is None:
            return None
        shown = parts[0].shown if parts else self._room(0, len(self._recipe.evaluated))
        if parts:
            self._add(_Block(parts))
        else:
            shown.future = Future()
            shown.future.set_result(None)
        return Validated(shown, validation.lengths(rows), self._recipe.evaluated)

    def stretch(
        self,
        asked: Stretch,
        ahead: Callable[[int], Ahead],
        resident: Callable[[str, int], Resident | None],
        validation: Validation | None,
    ) -> Stretched | None:
        """As many of these epochs as fill a launch. `ahead` says what so many of them update with.

        None where a batch size has no machine code, where some of the rows have no validation data, and where
        an epoch is much longer than a launch may be: others wait for their turn, and Ctrl-C for an end.
        """
        rows, parts = self._feed.rows(asked.chunks[0]), list[_Part]()
        lays = np.full(self.width, -1, np.int64)
        lays[rows.place] = asked.cursor.epoch
        for chunk in asked.chunks:
            code = resident("train", chunk.size)
            if code is None:
                return None
            begins = np.array([chunk.cursors[0].batch], np.int64)
            parts.append(self._training(chunk, rows, code, begins, None if parts else lays))
        validated: Sequence[_Part] | None = []
        if validation is not None and asked.validates:
            if validation.lengths(asked.rows).keys() != set(asked.rows):
                return None
            kind, size = validation.kind, self._feed.batch_size
            validated = self._validating(asked.rows, size, validation, lambda batch: resident(kind, batch))
            if not validated:
                return None
        epoch_s = _Block([*parts, *validated]).expected_s * self._slower
        if epoch_s > 2 * LAUNCH_S:
            return None
        told = asked.of(max(1, min(asked.epochs, _MOST_EPOCHS, int(LAUNCH_S / epoch_s))))
        numbers = ahead(told.epochs)
        if numbers.errors:
            return None
        shown = [self._room(chunk.steps, len(self._recipe.values), told.epochs) for chunk in told.chunks]
        parts = [replace(part, shown=one) for part, one in zip(parts, shown, strict=True)]
        found = None
        if validated:
            own = self._room(0, len(self._recipe.evaluated), told.epochs)
            validated = [replace(part, shown=own) for part in validated]
            assert validation is not None
            found = Validated(own, validation.lengths(asked.rows), self._recipe.evaluated)
        self._laid[rows.place] = asked.cursor.epoch + told.epochs - 1
        self._add(_Block([*parts, *validated], told.epochs, numbers))
        return Stretched(told, rows, shown, found, numbers, self._recipe.values)

    def _room(self, steps: int, values: int, epochs: int = 1) -> Shown:
        return Shown.room(self.launch, self.width, steps, values, epochs)

    def _training(
        self, chunk: Chunk, rows: Rows, resident: Resident, batches: np.ndarray, lays: np.ndarray | None
    ) -> _Part:
        first = rows.host * self.longest + batches * self._feed.batch_size
        shown = self._room(chunk.steps, len(self._recipe.values))
        batch, order = np.broadcast_to(batches, len(rows.host)), self._order.ctypes.data
        return _Part(resident, self._tensors, rows.host, order, first, batch, chunk.steps, shown, True, lays)

    def _validating(
        self,
        rows: Sequence[int],
        size: int,
        validation: Validation,
        resident: Callable[[int], Resident | None],
    ) -> list[_Part] | None:
        passes = validation.passes(rows, size)
        codes = {batch: resident(batch) for _, _, batch, _ in passes}
        shown = self._room(0, len(self._recipe.evaluated))
        order, parts = validation.tensors["order"], list[_Part]()
        for chosen, start, batch, steps in passes:
            if (code := codes[batch]) is None:
                return None
            own = np.array(chosen, np.int64)
            first = start + (own * order.shape[1] if len(order) > 1 else np.zeros_like(own))
            number = np.full_like(own, start // size)
            where = order.data_ptr()
            parts.append(_Part(code, validation.tensors, own, where, first, number, steps, shown))
        return parts

    def _add(self, block: _Block) -> None:
        expected_s = block.expected_s * self._slower
        self._blocks.append(block)
        self._expected_s += expected_s
        if block.ahead is not None:  # validation comes with the epoch that it follows
            self._told_s = expected_s
            if self._expected_s > 0.9 * LAUNCH_S or all(future.done() for future in self._running):
                self.launch()

    # Launching

    def launch(self) -> None:
        """Begins all that was told."""
        if not self._blocks:
            return
        blocks, self._blocks, self._expected_s = self._blocks, [], 0.0
        if self._counts is None:
            self.wait()
            self._counts = self._tensors["updates"].numpy().copy()
        made = _Launch(self, blocks, self._fed(blocks))
        self._running = [future for future in self._running if not future.done()]
        future = self._runner.submit(made.carry_out)
        self._running.append(future)
        for part in made.parts:
            part.shown.future = future

    def settle(self) -> None:
        """Begins all that was told and waits for it: the stack's tensors hold what it gave."""
        self.launch()
        self.wait()
        self._counts = None

    def wait(self) -> None:
        for future in self._running:
            future.result()
        self._running = []

    def _fed(self, blocks: Sequence[_Block]) -> dict[str, np.ndarray]:
        """The tables of all training steps of a launch, one behind another: [rows, steps, ...]."""
        aheads = [block.ahead for block in blocks if block.ahead is not None]
        if not aheads:
            return {}
        assert self._counts is not None
        due = np.concatenate([ahead.due for ahead in aheads])
        numbers = _joined(aheads)
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

    def table(self, part: _Part) -> np.ndarray:
        """Where a part's code finds the tensors that stay where they are."""
        key = id(part.resident), id(part.tensors)
        if key not in self._tables:
            self._tables[key] = table_of(part.resident.code, part.tensors)
        return self._tables[key]

    def ended(self, row_faults: np.ndarray, seconds: float, expected_s: float) -> None:
        """A launch is through: rows that raised take no more steps of any kind."""
        for row in np.flatnonzero(row_faults).tolist():
            self._tensors["alive"][row] = False
        self._slower = min(_MOST_SLOWER, max(1.0, seconds / expected_s))


def _joined(aheads: Sequence[Ahead]) -> np.ndarray:
    """The numbers of chunks, step by step; once where they are the same at all steps."""
    first = aheads[0].numbers
    if all(len(ahead.numbers) == 1 and np.array_equal(ahead.numbers, first) for ahead in aheads):
        return first
    return np.concatenate(
        [np.broadcast_to(ahead.numbers, (len(ahead.due), *ahead.numbers.shape[1:])) for ahead in aheads]
    )


class _Launch:
    """Blocks in the form that machine code takes, and everything that it reads meanwhile."""

    def __init__(self, epochs: Epochs, blocks: Sequence[_Block], fed: Mapping[str, np.ndarray]) -> None:
        self._epochs, self._blocks, self._fed = epochs, blocks, fed
        self.parts = [part for block in blocks for part in block.parts]
        self._active = np.zeros((len(self.parts), epochs.width), np.uint8)
        self._first = np.zeros((len(self.parts), epochs.width), np.int64)
        self._batch = np.zeros((len(self.parts), epochs.width), np.int64)
        for place, part in enumerate(self.parts):
            self._active[place, part.rows] = 1
            self._first[place, part.rows] = part.first
            self._batch[place, part.rows] = part.batch
        self._rows = np.flatnonzero(self._active.any(0))
        self._tables = [self._table(place, part) for place, part in enumerate(self.parts)]
        self._segments = self._made()
        self._made_blocks = np.concatenate(
            [
                block_of(segments, block.epochs, block.steps)
                for block, segments in zip(blocks, self._segments, strict=True)
            ]
        )
        bytes_each = [part.resident.code.memory_bytes for part in self.parts]
        self._bytes = max(scratch_bytes(epochs.longest), *bytes_each)

    def _made(self) -> list[np.ndarray]:
        """The segments of each block; training goes on in the tables where it ended."""
        made, place, step = [], 0, 0
        for block in self._blocks:
            own, begin = [], step
            for part in block.parts:
                own.append(
                    segment_of(
                        part.resident.library, self._tables[place], self._active[place], part.shown.faults,
                        part.steps, begin if part.trains else 0, lays=part.lays,
                    )
                )  # fmt: skip
                begin += part.steps if part.trains else 0
                place += 1
            made.append(np.concatenate(own))
            step += block.epochs * block.steps
        return made

    def _table(self, place: int, part: _Part) -> np.ndarray:
        shown = part.shown
        by_row = {
            "first": self._first[place],
            "batch": self._batch[place],
            **(self._fed if part.trains else {}),
        }
        by_epoch = {"sums": shown.sums, "taken": shown.taken}
        table = self._epochs.table(part).copy()
        for number, name in enumerate(part.resident.code.tensors):
            if name == "order":
                table[number] = part.order, 0, 0
            elif name in by_row:
                table[number] = by_row[name].ctypes.data, by_row[name].strides[0], 0
            elif name in by_epoch:
                held = by_epoch[name]
                table[number] = held.ctypes.data, held.strides[1], held.strides[0]
        assert table.dtype == TENSOR
        return table

    def carry_out(self) -> None:
        started = time.perf_counter()
        epochs = self._epochs
        carry_out(
            self._made_blocks, epochs.orders, self._rows, epochs.halted, epochs.memory, self._bytes,
            self.parts[0].resident.threads(),
        )  # fmt: skip
        seconds = time.perf_counter() - started
        faults = [(part.shown.faults >= 0).any(0) for part in self.parts]
        expected_s = sum(block.expected_s for block in self._blocks)
        epochs.ended(np.any(faults, 0), seconds, expected_s)
        for block in self._blocks:
            for part in block.parts:
                part.shown.seconds += part.expected_s * block.epochs * seconds / expected_s
