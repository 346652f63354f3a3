"""Members of one structure stepped by an engine's programs, with their callbacks at Keras' moments. A job alone is a stack of one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from carpool.adapters.base import Check, FusedSession, JobState, MetricRow, Prepared, StepFailure, Ticket
from carpool.adapters.keras.check import CHECKED, compared, lowest_of
from carpool.adapters.keras.engine import Engine, Feed
from carpool.adapters.keras.fit import Fit
from carpool.adapters.keras.launches import Held, Launch, Seen
from carpool.adapters.keras.reading import Reading, epoch_of, shapes
from carpool.adapters.keras.shown import Shown
from carpool.errors import failure
from carpool.job import Job
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk, Cursor


class StackedFit(FusedSession):
    """A group of fits on a device. While it is open the stack holds the truth; a model holds it at its callbacks' moments."""

    def __init__(
        self, fits: Sequence[Fit], make: Any, device: str, key: Any, prepared: Prepared = lambda *_: None
    ) -> None:
        self._fits = dict(enumerate(fits))
        self.width, self._key = len(fits), (key, device)
        self.schedules = any(fit.moments or fit.given_validation is not None for fit in fits)
        seeds = [fit.job.seed for fit in fits]
        self._engine: Engine = make([fit.model for fit in fits], device, key, seeds)
        self._held: Held | None = None
        self._stack = self._engine.stack()
        self._reading = Reading(self._fits, self._engine.place, self._engine.shares_order)
        self._engine.is_order_shared = self._reading.is_shared
        self._shown = Shown([fit.model for fit in fits])
        self._start: dict[int, list[np.ndarray]] = {}
        """What models held before they were first given a row's state."""
        self._begun: dict[int, Cursor] = {}
        """Where each row stood when its callbacks last heard of a beginning."""
        self._raised: dict[int, BaseException] = {}
        """What a row's callbacks raised while others were at the same place."""
        self._left: set[int] = set()
        self._shapes: set[tuple[int, int]] = set()
        self._prepare_s = 0.0
        self._prepared = prepared
        self._prepare()

    def turn(self) -> AbstractContextManager[object]:
        return self._engine.turn()

    def _prepare(self) -> None:
        """Programs for the shapes that the first epochs will ask for, made side by side."""
        began = time.perf_counter()
        wanted: set[tuple[int, int]] = set()
        for fit in self._fits.values():
            wanted |= set(shapes(fit.course, self._most(fit)))
        alike = len({epoch_of(fit.course) for fit in self._fits.values()}) == 1
        if alike:  # else who runs with whom is the driver's to say
            self._shapes = wanted
            parts = tuple(shapes(self._fits[0].course, self._most(self._fits[0])))
            if self._engine.takes_epochs and (
                held := Held.of(parts, 1 if self._reading.is_shared else self.width)
            ):
                self._engine.prepare_epochs(self._stack, self._reading.pool, parts, held.most)
                self._held = held
                self.in_flight = 2 if self.schedules else len(parts) * held.most
            else:
                self._engine.prepare(self._stack, self._reading.pool, sorted(wanted, reverse=True))
        self._prepare_s = time.perf_counter() - began

    def _most(self, fit: Fit) -> int:
        """Batches in a launch: one where a callback sees every batch, or wants to end training at the next."""
        return 1 if fit.moments.each_batch or fit.moments.stops else MAX_CHUNK_STEPS

    # Stepping

    def advance(self, chunk: Chunk) -> Ticket:
        """Enqueues as many of the chunk's steps as one launch may cover."""
        errors = self._begin(chunk)
        if errors:
            raise StepFailure([Ticket(chunk.shortened(0), None)], errors)
        steps = self._steps(chunk)
        done = chunk.shortened(steps)
        seen = Seen()
        feed = self._reading.feed(done)
        if self._held is not None and self._held.takes(done):
            self._held.waiting.append((done, feed, seen))
            if self._held.is_due:
                self._launch_epochs()
        else:
            self._launch(done, feed, seen)
        return self._after_batch(Ticket(done, seen))

    @property
    def _stack(self) -> Any:
        """The stack with all that was asked for enqueued."""
        held = self._held
        while held is not None and held.epochs:
            self._launch_epochs()
        if held is not None and held.waiting:
            waiting, held.waiting = held.waiting, []
            for chunk, feed, seen in waiting:
                self._launch(chunk, feed, seen)
        return self._enqueued

    @_stack.setter
    def _stack(self, stack: Any) -> None:
        self._enqueued = stack

    def _launch(self, chunk: Chunk, feed: Feed, seen: Seen) -> None:
        active, fresh = np.zeros(self.width, bool), np.zeros(self.width, bool)
        first = np.zeros(self.width, np.int64)
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            active[row], fresh[row], first[row] = True, cursor.batch == 0, cursor.step
        self._stack, logs = self._engine.train(self._stack, feed, active, fresh, first)
        seen.launch = Launch(logs)

    def _launch_epochs(self) -> None:
        """Launches the whole epochs that wait as one."""
        assert self._held is not None
        held = self._held
        taken = held.taken()
        active = np.zeros(self.width, bool)
        active[list(taken[0][0].rows)] = True
        orders = [
            np.stack([feed.order for _, feed, _ in taken[part :: len(held.parts)]], axis=1)
            for part in range(len(held.parts))
        ]
        self._enqueued, logs = self._engine.train_epochs(
            self._enqueued, self._reading.pool, orders, active, held.full
        )
        launch = Launch(logs)
        for position, (_, _, seen) in enumerate(taken):
            seen.launch, seen.epoch = launch, position // len(held.parts)

    def _begin(self, chunk: Chunk) -> dict[int, BaseException]:
        """Training's, the epoch's and the batch's beginning, once for each row that stands there."""
        errors: dict[int, BaseException] = {}
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            fit, moments = self._fits[row], self._fits[row].moments
            if self._begun.get(row) == cursor:
                continue  # another row raised at this place, and the chunk was cut anew
            self._begun[row] = cursor
            try:
                if not moments.has_begun:
                    moments.begin(fit.course.batches)
                    self._moment(row, "on_train_begin")
                if cursor.batch == 0:
                    self._moment(row, "on_epoch_begin", fit.options.initial_epoch + cursor.epoch)
                if moments.each_batch:
                    self._moment(row, "on_train_batch_begin", cursor.batch)
            except BaseException as error:
                failure(error)
                errors[row] = error
        return errors

    def _after_batch(self, ticket: Ticket) -> Ticket:
        """Callbacks that see every batch see this one; one of them may end training here."""
        chunk = ticket.chunk
        watched = [row for row in chunk.rows if self._fits[row].moments.each_batch]
        shown = self._seen(ticket).read(self._engine) if watched else {}
        errors: dict[int, BaseException] = {}
        for row in watched:
            cursor = chunk.cursors[chunk.rows.index(row)]
            try:
                self._moment(row, "on_train_batch_end", cursor.batch, logs=self._shown.of(row, shown))
            except BaseException as error:
                failure(error)
                errors[row] = error
        stopped = [row for row in chunk.rows if self._fits[row].moments.stops and row not in errors]
        ends = tuple(row for row in chunk.rows if row in chunk.ends or row in stopped)
        cut = Ticket(Chunk(chunk.rows, chunk.cursors, chunk.size, chunk.steps, ends), ticket.payload)
        if errors:
            raise StepFailure([cut], errors)
        return cut

    def _steps(self, chunk: Chunk) -> int:
        """Lengths that there is a program for, or powers of two: each other one would have to be compiled."""
        most = min(self._most(self._fits[row]) for row in chunk.rows)
        steps = min(chunk.steps, most)
        known = [length for length, size in self._shapes if size == chunk.size and length <= steps]
        return max(known) if known else 1 << (steps.bit_length() - 1)

    def done(self, ticket: Ticket) -> bool:
        if ticket.payload is None:
            return True
        launch = self._seen(ticket).launch
        assert launch is not None
        is_ready = self._engine.ready(launch.logs)
        if is_ready and self._held is not None:
            self._held.slow_down(launch)
        return is_ready

    def _seen(self, ticket: Ticket) -> Seen:
        """What a chunk shows; one that was kept back is enqueued now."""
        if ticket.payload.launch is None:
            self._stack  # noqa: B018  # enqueues what waits
        return ticket.payload

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        """Numbers only where an epoch ended: Keras' metrics are of the whole epoch, whatever kind of sum they keep."""
        chunk = ticket.chunk
        is_shown = chunk.ends and ticket.payload is not None
        shown = self._seen(ticket).read(self._engine) if is_shown else {}
        return tuple(
            MetricRow(row, chunk.steps, 1, self._shown.of(row, shown))
            if row in chunk.ends
            else MetricRow(row, chunk.steps, 0, {})
            for row in chunk.rows
        )

    # Epochs

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        wanted = [row for row in rows if self._fits[row].validates(self._epochs(row))]
        if not self._reading.validates:
            return ()
        wanted = [row for row in wanted if self._told(row, "on_test_begin")]
        if not wanted:
            return ()
        active = np.zeros(self.width, bool)
        active[wanted] = True
        self._stack, logs = self._engine.test(self._stack, self._reading.validation(wanted[0]), active)
        shown = self._engine.read(logs)
        found = {row: self._shown.of(row, shown) for row in wanted}
        return tuple(
            MetricRow(row, 0, 1, own) for row, own in found.items() if self._told(row, "on_test_end", own)
        )

    def _told(self, row: int, moment: str, logs: Mapping[str, float] | None = None) -> bool:
        """Whether the row's callbacks took the moment; what they raised, the row raises when its epoch ends."""
        try:
            self._moment(row, moment, logs=logs)
        except BaseException as error:
            failure(error)
            self._raised[row] = error
            return False
        return True

    def _epochs(self, row: int) -> int:
        """The epoch that a row is about to end, counted from 0."""
        return self._fits[row].moments.epochs_ended

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Keras' end of an epoch, and of training after the last; what callbacks added to the logs."""
        if row in self._raised:
            raise self._raised.pop(row)
        fit = self._fits[row]
        epoch = self._epochs(row)
        with self._at_home(row) if fit.moments.has("on_epoch_end") else nullcontext():
            added = fit.moments.end_epoch(fit.options.initial_epoch + epoch, metrics)
        if fit.moments.stops or epoch + 1 == fit.course.epochs:
            self._finalize(row)
            self._moment(row, "on_train_end", logs=metrics)
            fit.moments.end()
        return added

    def _finalize(self, row: int) -> None:
        """What `fit` does however it ends, such as putting moving averages in the place of weights."""
        model = self._fits[row].model
        if _finalizes(model.optimizer):
            with self._at_home(row):
                model.optimizer.finalize_variable_values(model.trainable_weights)

    def wants_to_stop(self, row: int) -> bool:
        return self._fits[row].moments.stops

    def _moment(
        self, row: int, moment: str, *arguments: Any, logs: Mapping[str, float] | None = None
    ) -> None:
        moments = self._fits[row].moments
        if not moments.has(moment):
            moments.at(moment, *arguments, logs=logs)
            return
        with self._at_home(row):
            moments.at(moment, *arguments, logs=logs)

    @contextmanager
    def _at_home(self, row: int) -> Iterator[None]:
        """Inside, the row's model holds its state; what is changed there goes on from there."""
        if row not in self._start:
            self._start[row] = [_copied(variable) for variable in _held(self._fits[row].model)]
        self._engine.put(self._stack, row)
        try:
            yield
        finally:
            self._stack = self._engine.take(self._stack, row)

    def _bring_home(self) -> None:
        """Gives every model its row's state; nothing changes it there."""
        for row, fit in self._fits.items():
            if row not in self._start:
                self._start[row] = [_copied(variable) for variable in _held(fit.model)]
        self._engine.put_all(self._stack, list(self._fits))

    # States

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing: restoring the best weights is a callback's, EarlyStopping(restore_best_weights=True)."""

    def revert(self, rows: Sequence[int]) -> None:
        return

    def restored(self, row: int) -> int | None:
        return self._fits[row].moments.restored(self._fits[row].options.initial_epoch)

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        """The rows' models hold it."""
        self._engine.put_all(self._stack, rows)
        return tuple(JobState(Cursor(), {}) for _ in rows)

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        for row in rows:
            if self._fits[row].moments.has_begun:  # it ends before its training does
                self._finalize(row)
                self._fits[row].moments.end()
        states = self.state(rows)
        self._left |= set(rows)
        return states

    def load(self, row: int, state: JobState) -> None:
        self._stack = self._engine.take(self._stack, row)

    def join(self, row: int, job: Job, state: JobState | None = None) -> None:
        raise NotImplementedError("Keras stacks take no new members yet")

    def copy(self, source: int, target: int) -> None:
        raise NotImplementedError("Keras stacks copy no members yet")

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        raise NotImplementedError("call the models")

    # What only groups need

    def check(self, chunk: Chunk, rows: Sequence[int]) -> Check:
        """The last row's step beside its model's own: the program was traced with the first row's model.

        A structure's first step is compared once in a process, later ones wherever that is asked for.
        """
        is_first = all(cursor.step == 0 for cursor in chunk.cursors)
        if self.width == 1 or (is_first and self._key in CHECKED):
            return Check()
        if not is_first:
            self._bring_home()
        row, feed = rows[-1], self._reading.feed(chunk.shortened(1))
        alone = self._engine.step_alone(row, feed)
        if alone is None:
            return Check()
        every = np.ones(self.width, bool)
        first = np.zeros(self.width, np.int64)
        trial, logs = self._engine.train(self._engine.stack(), feed, every, every, first)
        fit, after = self._fits[row], self._engine.after_step(trial, row, logs)
        check = compared(str(fit.job.name), alone, after, lowest_of(fit.model))
        if check.mismatch is None:
            CHECKED.add(self._key)
        return check

    def resize(self, width: int) -> Mapping[int, int]:
        kept = [row for row in range(self.width) if row not in self._left][:width]
        free = [row for row in range(self.width) if row in self._left]
        kept += free[: width - len(kept)]
        moved = {row: place for place, row in enumerate(kept)}
        self._stack = self._engine.narrow(self._stack, kept)
        self._reading.narrow(kept)
        self._shown.narrow(kept)
        self._fits = {moved[row]: self._fits[row] for row in kept}
        self._left = {moved[row] for row in kept if row in self._left}
        self._start = {moved[row]: start for row, start in self._start.items() if row in moved}
        self._begun = {moved[row]: cursor for row, cursor in self._begun.items() if row in moved}
        self.width = width
        if self._held is not None:
            self._held = Held.of(self._held.parts, 1 if self._reading.is_shared else width)
        return moved

    def disturbed(self, row: int) -> str | None:
        return None  # a callback may change its model: what it changes is taken up

    def abandon(self) -> None:
        """Models that no callback has seen still hold what they came with."""
        for row, fit in self._fits.items():
            if row in self._left:
                continue
            fit.moments.end()
            if row in self._start:
                for variable, value in zip(_held(fit.model), self._start[row], strict=True):
                    variable.assign(value)
            self._engine.revert(row)  # last: where the models are the stack, it knows what they came with

    def timing(self) -> tuple[float, float]:
        """No step's time: chunks are not cut to a slice, for each other length would have to be compiled."""
        return 0.0, self._prepare_s

    def close(self) -> None:
        self._engine.close()
        self._stack = None


def _finalizes(optimizer: Any) -> bool:
    """Whether an optimizer has something to do when training is over."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kind = type(inner)
    return inner.use_ema or kind.finalize_variable_values is not keras.Optimizer.finalize_variable_values


def _held(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables]


def _copied(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))
