"""A job's graph under a session of its own, stepped by a thread of its own: TensorFlow lets other threads go on while it computes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.adapters.base import DeviceFull, JobState, MetricRow, Session, StepFailure, Ticket
from carpool.adapters.graph import values
from carpool.adapters.graph.build import Built
from carpool.adapters.graph.config import config, inside_of
from carpool.adapters.graph.explain import explained
from carpool.adapters.graph.feeding import Arrays, Exhausted, Fed
from carpool.adapters.graph.fetched import Fetched, scalars
from carpool.adapters.graph.queues import Runners
from carpool.adapters.graph.step import Step
from carpool.errors import StepError, failure, sentence
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk, Cursor, Supply
from carpool.source import Source

_v1 = tf.compat.v1
_SLICE_S = 0.1  # how long a chunk should take: what Ctrl-C waits for
_STUCK_S = 5.0  # how long a step may go on once everything ends


@dataclass
class Done:
    """What the thread did of a chunk."""

    steps: int = 0
    samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    """What ended it, or a chunk before it."""

    def count(self, shown: Mapping[str, float], samples: int) -> None:
        self.steps += 1
        self.samples += samples
        for name, value in shown.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * samples


class GraphSession(Session):
    """One job. Only its thread steps it; everything else that is asked of it happens while no step is enqueued."""

    def __init__(
        self, built: Built, place: Mapping[str, Any] | None = None, fraction: float | None = None
    ) -> None:
        self._built = built
        self.schedules = built.saver is not None  # checkpoints are of an epoch's end
        made = config(built.model.config, in_caller=not built.waits, fraction=fraction)
        made.MergeFrom(_v1.ConfigProto(**(place or {})))
        self._tf, self._inside = _v1.Session(graph=built.graph, config=made), inside_of(made)
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._fetched = Fetched(is_whole=not built.changes)
        self._best: Mapping[str, np.ndarray] = {}
        self._error: BaseException | None = None
        self._is_ended = self._is_stopping = self._is_closed = False
        self._failed = False  # the last chunk whose metrics were read
        self._last: dict[str, np.ndarray] | None = None
        self._busy_s = self._step_s = 0.0
        self._asked = self._in_row = 0
        self._pending: Future[Done] | None = None
        self._tap = built.data.tap(built.job.epochs) if isinstance(built.data, Source) else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"carpool graph {built.job.name}")
        self._runners: Runners | None = None
        self._writer: Any = None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        built, model = self._built, self._built.model
        values.initialise(self._tf, model.init, built.constants, built.names.element)
        if model.restore is not None:
            values.write(self._tf, values.checkpointed(model.restore, self._tf.graph))
        values.write(self._tf, model.variables)
        if model.init is not None:
            values.check_initialised(self._tf, built.used)
        if model.summaries is not None:
            with built.graph.as_default():  # the writer refuses to be made where tensors are eager
                self._writer = _v1.summary.FileWriter(str(model.summaries[1]), built.graph)
        self._runners = Runners(self._tf)

    # Asked between chunks

    @property
    def _total(self) -> int | None:
        return self._built.model.steps

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        if self._tap is not None:
            return self._streamed(rows)
        every, total = self._built.model.every, self._total
        in_row = self._asked % every
        if total is None:
            if in_row == 0 and self._asked and not self._has_settled():
                return {}  # it may end anywhere: a row is told to be full when it is
            return dict.fromkeys(rows, Supply(1, every - in_row, ends=False))
        steps = min(every - in_row, total - self._asked)
        return dict.fromkeys(rows, Supply(1, max(1, steps), ends=True))

    def _streamed(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        assert self._tap is not None
        try:
            ready = self._tap.ready()
        except BaseException as error:
            failure(error)
            return dict.fromkeys(rows, error)
        if not ready:
            return {}
        first = _size(ready[0].batch)
        count = 0
        for item in ready:
            if _size(item.batch) != first:
                break
            count += 1
            if item.last:
                break
        return dict.fromkeys(rows, Supply(first, count, ends=ready[count - 1].last))

    def depth(self, row: int) -> tuple[int, int] | None:
        return None if self._tap is None else (self._tap.depth, self._tap.capacity)

    def _has_settled(self) -> bool:
        return self._pending is None or self._pending.done()

    def advance(self, chunk: Chunk) -> Ticket:
        """Enqueues as many of the chunk's steps as fit a slice; the thread takes them from there."""
        empty = Chunk(chunk.rows, chunk.cursors, chunk.size, 0)
        if self._error is not None:
            raise self._full() or StepFailure([Ticket(empty, None)], {0: self._error}) from self._error
        if self._is_ended:
            self._settled()
            return Ticket(
                Chunk(chunk.rows, chunk.cursors, chunk.size, 0, (0,) if self._in_row else ()),
                None,
                final=True,
            )
        if self._is_open and self._in_row >= self._built.model.every:
            self._in_row = 0
            return Ticket(Chunk(chunk.rows, chunk.cursors, chunk.size, 0, (0,)), None)
        most = max(1, int(_SLICE_S / self._step_s)) if self._step_s else 1
        part = chunk.shortened(min(chunk.steps, most, MAX_CHUNK_STEPS))
        batches: list[Fed] = []
        if self._tap is not None:
            batches = [item.batch for item in self._tap.ready()[: part.steps]]
            self._tap.take(len(batches))
        self._asked += part.steps
        self._pending = self._thread.submit(self._carry_out, part, batches)
        return Ticket(part, self._pending)

    @property
    def _is_open(self) -> bool:
        """Whether only its input says when it ends."""
        return self._built.data is None and self._total is None

    def _full(self) -> DeviceFull | None:
        """Where the device is full: the step may be half done."""
        full = isinstance(self._error, tf.errors.ResourceExhaustedError | MemoryError)
        return DeviceFull((), self._error) if full and self._error is not None else None

    def done(self, ticket: Ticket) -> bool:
        return ticket.payload is None or ticket.payload.done()

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        if ticket.payload is None:
            return (MetricRow(0, 0, 0, {}),)
        done: Done = self._waited(ticket.payload)
        self._failed = done.error is not None
        return (MetricRow(0, done.steps, done.samples, done.sums),)

    def _settled(self) -> None:
        if self._pending is not None:
            self._waited(self._pending)

    def _waited(self, future: Future[Done]) -> Done:
        """What the thread did. A step that waits for what never comes is ended: whoever waits here has nothing else to wait for."""
        if not wait([future], _STUCK_S).done:
            self._is_stopping = True
            assert self._runners is not None
            self._runners.ask()
            if not wait([future], _STUCK_S).done:
                self._last = self._last or values.read(self._tf)
                self._error = StepError(_STUCK)
                self._tf.close()
        return future.result()

    def busy_s(self) -> float | None:
        return self._busy_s

    # In the thread

    def _carry_out(self, chunk: Chunk, batches: Sequence[Fed]) -> Done:
        done, cursor, began = Done(), chunk.cursors[0], time.perf_counter()
        for number in range(chunk.steps):
            if self._is_stopping or self._is_ended or self._error is not None:
                break
            try:
                fed = batches[number] if batches else self._data(cursor.epoch, cursor.batch + number)
                done.count(self._step(fed, cursor.step + number), _size(fed) if fed else 1)
            except (Exhausted, tf.errors.OutOfRangeError) as error:
                self._end(error)
            except BaseException as error:
                failure(error)
                self._error = self._error if self._is_stopping else explained(error)
        took_s = time.perf_counter() - began
        self._busy_s += took_s
        if done.steps:
            self._step_s = took_s / done.steps
        self._in_row += done.steps
        done.error = self._error
        return done

    def _data(self, epoch: int, batch: int) -> Fed:
        data = self._built.data
        return data.batch(epoch, batch) if isinstance(data, Arrays) else {}

    def _step(self, fed: Fed, number: int) -> dict[str, float]:
        built = self._built
        given = {} if built.maker is None else built.fed_now(built.maker(number))
        writer = self._writer if number % built.model.every == 0 else None
        everything = {**built.constants, **fed, **given}
        made = self._prepared(tuple(everything), writer is not None)(everything)
        if writer is not None:
            writer.add_summary(made.pop(_SUMMARY), number)
        self._fetched.take(made, _size(fed) if fed else None)
        return scalars(made)

    def _prepared(self, fed: tuple[str, ...], summary: bool) -> Step:
        key = (fed, summary)
        if key not in self._steps:
            built = self._built
            fetches = {**built.fetches, **({_SUMMARY: built.summary} if summary else {})}
            self._steps[key] = Step(self._tf, fed, fetches, built.train, self._inside)
        return self._steps[key]

    def _end(self, error: BaseException) -> None:
        """The input has ended; where a queue runner failed, that is why."""
        assert self._runners is not None
        raised = None if isinstance(error, Exhausted) else self._runners.error()
        if raised is not None:
            self._error = explained(raised)
        self._is_ended = True

    # What the driver decides

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        if self._failed and self._error is not None:  # in the epoch's last chunk: the epoch does not count
            raise self._full() or self._error
        data = self._built.validation
        if data is None:
            return ()
        done = Done()
        names = (*self._built.validation_constants, *data.arrays)
        step = Step(self._tf, tuple(dict.fromkeys(names)), self._built.shown, inside=self._inside)
        for number in range(math.ceil(data.length / data.batch_size)):
            fed = data.batch(0, number)
            done.count(scalars(step({**self._built.validation_constants, **fed})), _size(fed))
        return (MetricRow(0, done.steps, done.samples, done.sums),)

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        self._in_row = 0 if not self._is_open else self._in_row
        if self._built.saver is not None:
            target = Path(str(self._built.model.checkpoints))
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._built.graph.as_default():  # a saver looks where it is used
                self._built.saver.save(self._tf, str(target), global_step=self._asked)
        if self._writer is not None:
            self._writer.flush()

    def keep(self, rows: Sequence[int]) -> None:
        if rows:
            self._best = values.read(self._tf)

    def revert(self, rows: Sequence[int]) -> None:
        if rows:
            values.write(self._tf, self._best)

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        held = self._last if self._last is not None else values.read(self._tf)
        return (job_state(held, self._fetched.values),)

    def load(self, row: int, state: JobState) -> None:
        held, _ = held_in(state)
        values.write(self._tf, held)
        self._asked = state.cursor.step

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        raise NotImplementedError("a graph is run by its own session: see Graph.session")

    def close(self) -> None:
        """Ends the thread, the queue runners and the session, whatever they are doing."""
        if self._is_closed:
            return
        self._is_closed = self._is_stopping = True
        if self._runners is not None:
            self._runners.stop()
        self._tf.close()  # whoever still waits in a step is told so
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._steps.clear()
        if self._tap is not None:
            self._tap.close()
        if self._writer is not None:
            self._writer.close()


_STUCK = sentence("a step to end", "one that waits for ever", "fill the queue that it reads, or close it")
_SUMMARY = "carpool summary"
_VARIABLE, _FETCHED = "variable ", "fetched "


def job_state(variables: Mapping[str, np.ndarray], fetched: Mapping[str, Any]) -> JobState:
    """A graph's state by name: its variables, and what was fetched of it."""
    held = {_VARIABLE + name: value for name, value in variables.items()}
    return JobState(Cursor(), held | {_FETCHED + name: value for name, value in fetched.items()})


def held_in(state: JobState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables and what was fetched, out of a state."""
    return tuple(  # type: ignore[return-value]
        {name.removeprefix(word): value for name, value in state.model.items() if name.startswith(word)}
        for word in (_VARIABLE, _FETCHED)
    )


def _size(fed: Fed) -> int:
    return len(next(iter(fed.values())))
