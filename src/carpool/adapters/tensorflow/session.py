"""Jobs whose data is all there, stepped by one function: a job alone is a group of one. The user's own variables are the truth."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.adapters.base import Check, FusedSession, JobState, MetricRow, Prepared, Ticket, Unstackable
from carpool.adapters.tensorflow import mirrored, program
from carpool.adapters.tensorflow.arrays import Arrays, Store
from carpool.adapters.tensorflow.build import Built
from carpool.adapters.tensorflow.check import compared
from carpool.adapters.tensorflow.program import Program
from carpool.adapters.tensorflow.reading import Reading
from carpool.adapters.tensorflow.rows import Rows
from carpool.adapters.tensorflow.state import Remembered
from carpool.errors import failure
from carpool.job import Job
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk
from carpool.planning.trials import Trial
from carpool.windows import measured

_TIMED_STEPS = 8


class RowsSession(FusedSession):
    """Each row has a loop of its own in one function. Rows that have left take no steps in it."""

    def __init__(
        self,
        builts: Sequence[Built],
        store: Store,
        device: str,
        is_jit: bool,
        prepared: Prepared = lambda *_: None,
        remember: Callable[[Trial, bool], None] = lambda trial, busy: None,
    ) -> None:
        self._rows, self._store, self._device, self._is_jit = (
            Rows(builts, store, device),
            store,
            device,
            is_jit,
        )
        self._prepared, self._remember, self.width = prepared, remember, len(builts)
        self._readings = [Reading(built.job, _arrays(built)) for built in builts]
        self._programs: dict[int | None, Program] = {}
        self._is_exact = is_jit or any(built.is_exact for built in builts)
        self._most = min(MAX_CHUNK_STEPS, max(_arrays(b).length // _first(b) for b in builts))
        """Steps of a launch."""
        self._places = list(range(self.width))
        """The loop of each row: a row keeps its loop when the group narrows."""
        self._start = {built: Remembered((*built.variables, *built.others)) for built in builts}
        self._left: set[Built] = set()
        self.sizes = sorted({size for built in builts for size in _sizes(built)}, reverse=True)
        """Of the batches that there will be."""
        for size in self.sizes:
            self._program(size)

    # Programs

    def _program(self, size: int) -> Program:
        """For batches of this size, traced before training starts: one for all sizes, where nobody has to know them."""
        known = size if self._is_exact else None
        if known not in self._programs:
            began = time.perf_counter()
            self._programs[known] = made = self._made(known)
            is_compiled = self._is_jit and made.plain_reason is None
            self._prepared(
                size, self.width, "compiled" if is_compiled else "traced", time.perf_counter() - began
            )
        return self._programs[known]

    def _made(self, size: int | None) -> Program:
        rows = [(built, self._store.all(self._device, _arrays(built))) for built in self._rows.builts]
        with tf.device(self._device), mirrored.scope(self._rows.builts[0].strategy):
            if not self._is_jit or size is None or size != self._rows.builts[0].first_size:
                # The short last batch is one step of an epoch: compiling it would take as long again.
                return program.training(rows, size, self._most, is_jit=False)
            made = program.training(rows, size, self._most, is_jit=True)
            try:
                made(*_nothing(self.width, self._most, size))  # runs no step, which makes XLA compile
            except tf.errors.ResourceExhaustedError:
                raise
            except BaseException as error:
                failure(error)
                made = program.training(rows, size, self._most, is_jit=False)
                made.plain_reason = f"XLA cannot compile it: {str(error).strip().splitlines()[0]}"
        return made

    # Stepping

    def advance(self, chunk: Chunk) -> Ticket:
        done = chunk.shortened(min(chunk.steps, self._most))
        orders, counts, firsts = self._arguments(done)
        run = self._program(done.size)
        return Ticket(done, self._rows.train(run, counts, lambda steps: (orders, steps, firsts)))

    def _arguments(self, chunk: Chunk) -> tuple[Any, np.ndarray, Any]:
        orders, counts, firsts = _nothing(len(self._rows.builts), self._most, chunk.size)
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            place = self._places[row]
            orders[place, : chunk.steps] = self._readings[place].batches(cursor, chunk.steps, chunk.size)
            counts[place], firsts[place] = chunk.steps, cursor.step
        return tf.constant(orders), counts, tf.constant(firsts)

    def done(self, ticket: Ticket) -> bool:
        return ticket.payload.done()

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        vectors = ticket.payload.result()
        found = [
            self._rows.metric_row(self._places[row], vectors[self._places[row]]) for row in ticket.chunk.rows
        ]
        return self._numbered(found)

    def _numbered(self, found: Sequence[MetricRow]) -> tuple[MetricRow, ...]:
        """Rows by the numbers that the driver has for them."""
        numbers = {place: row for row, place in enumerate(self._places)}
        return tuple(
            MetricRow(numbers[one.row], one.steps, one.samples, one.sums, one.diverged) for one in found
        )

    # Epochs and states

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        return self._numbered(self._rows.evaluate(self._at(rows)))

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        return

    def keep(self, rows: Sequence[int]) -> None:
        self._rows.keep(self._at(rows))

    def revert(self, rows: Sequence[int]) -> None:
        self._rows.revert(self._at(rows))

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        return self._rows.state(self._at(rows))

    def load(self, row: int, state: JobState) -> None:
        self._rows.load(self._places[row], state)

    def _at(self, rows: Sequence[int]) -> list[int]:
        return [self._places[row] for row in rows]

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        states = self.state(rows)
        self._left |= {self._rows.builts[place] for place in self._at(rows)}
        return states

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        raise NotImplementedError("call the modules")

    def close(self) -> None:
        self._rows.close()
        self._programs.clear()
        self._start.clear()

    # What only groups need

    def check(self, chunk: Chunk, rows: Sequence[int]) -> Check:
        """The chunk's first step beside the same step of each row as Python runs it, operation by operation."""
        if self.width == 1:
            return Check()
        builts = [self._rows.builts[place] for place in self._at(rows)]
        before = {built: Remembered((*built.variables, *built.others)) for built in self._rows.builts}
        try:
            orders, counts, firsts = self._arguments(chunk.shortened(1))
            self._rows.submit(self._program(chunk.size), orders, tf.constant(counts), firsts).result()
            together = {built: [held.read().numpy() for held in built.variables] for built in builts}
        finally:
            for one in before.values():
                one.put_back()
        checks = []
        for row, built in zip(rows, builts, strict=True):
            cursor = chunk.cursors[chunk.rows.index(row)]
            positions = self._readings[self._places[row]].batches(cursor, 1, chunk.size)[0]
            checks.append(compared(built, positions, cursor.step, together[built], before[built]))
        return Check.of(checks)

    def trial(self, chunk: Chunk) -> Trial | None:
        """A launch of all rows beside one of a row alone, a step at a time; every variable is put back."""
        if self.width == 1:
            return None
        steps = min(_TIMED_STEPS, self._most)
        alone = RowsSession(self._rows.builts[:1], self._store, self._device, self._is_jit)
        try:
            found = measured([self._timed(chunk.size, steps), alone._timed(chunk.size, steps)])
        finally:
            alone.close()
        if not found.agrees:
            return None
        together_s, alone_s = found.seconds
        trial = Trial(self.width, together_s / steps, alone_s / steps, self._is_jit)
        self._remember(trial, found.busy)
        return trial

    def _timed(self, size: int, steps: int) -> Callable[[], float]:
        """What returns the seconds of such a launch; every variable is put back after it."""
        orders, counts, firsts = _nothing(len(self._rows.builts), self._most, size)
        counts[:] = steps
        arguments = (tf.constant(orders), tf.constant(counts), tf.constant(firsts))

        def timed() -> float:
            before = [Remembered((*built.variables, *built.others)) for built in self._rows.builts]
            began = time.perf_counter()
            try:
                self._rows.submit(self._program(size), *arguments).result()
                return time.perf_counter() - began
            finally:
                for one in before:
                    one.put_back()

        return timed

    def join(self, row: int, job: Job, state: JobState | None = None) -> None:
        raise NotImplementedError("a function of TensorFlow jobs takes no new members")

    def copy(self, source: int, target: int) -> None:
        self.load(target, self.state([source])[0])

    def resize(self, width: int) -> Mapping[int, int]:
        """Rows that have left take no time: the function stays as it is."""
        here = [row for row in range(self.width) if self._rows.builts[self._places[row]] not in self._left]
        gone = [row for row in range(self.width) if row not in here]
        kept = (here + gone)[:width]
        self._places = [self._places[row] for row in kept]
        self.width = width
        return {row: place for place, row in enumerate(kept)}

    def disturbed(self, row: int) -> str | None:
        return None  # its variables are the user's own: what a callback changes is changed

    def abandon(self) -> None:
        self._rows.wait()
        for built, start in self._start.items():
            if built not in self._left:
                start.put_back()

    def timing(self) -> tuple[float, float]:
        return 0.0, 0.0  # nothing is gained by a narrower function


def _nothing(width: int, most: int, size: int) -> tuple[Any, Any, Any]:
    """Arguments with which no row takes a step."""
    return np.zeros((width, most, size), np.int32), np.zeros(width, np.int32), np.zeros(width, np.int64)


def _first(built: Built) -> int:
    return min(built.job.batch_size, _arrays(built).length)


def _sizes(built: Built) -> set[int]:
    length, size = _arrays(built).length, built.job.batch_size
    return {min(size, length)} | ({length % size} - {0})


def _arrays(built: Built) -> Arrays:
    if not isinstance(built.data, Arrays):
        raise Unstackable(f"{built.job.name!r} reads a stream")
    return built.data
