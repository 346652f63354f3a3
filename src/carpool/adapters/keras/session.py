"""Members of one structure stepped by an engine's programs, with their callbacks at Keras' moments. A job alone is a stack of one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from carpool.adapters.base import Check, FusedSession, JobState, MetricRow, Prepared, StepFailure, Ticket
from carpool.adapters.keras.engine import Engine, Feed
from carpool.adapters.keras.fit import Fit
from carpool.adapters.keras.launches import Held, Launch, Seen
from carpool.adapters.keras.pool import Pool
from carpool.job import Job
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk, Course, Cursor
from carpool.random import batch_orders

_SHUFFLED = 8  # epochs that are shuffled at a time
_checked: set[Any] = set()  # structures whose first step was compared in this process
_RTOL, _ATOL = 2e-4, 2e-5  # of one step together against one alone, in single precision


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
        self._start = (
            {row: fit.model.get_weights() for row, fit in self._fits.items()} if self.width > 1 else {}
        )
        self._training = Pool([fit.training for fit in fits], self._engine.place)
        held = [fit.validation for fit in fits]
        self._validation = Pool(held, self._engine.place) if None not in held else None
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._shuffles: dict[Any, np.ndarray] = {}
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
        shapes: set[tuple[int, int]] = set()
        for fit in self._fits.values():
            shapes |= set(_shapes(fit.course, self._most(fit)))
        if (
            len({fit.course for fit in self._fits.values()}) == 1
        ):  # else who runs with whom is the driver's to say
            self._shapes = shapes
            parts = tuple(_shapes(self._fits[0].course, self._most(self._fits[0])))
            if self._engine.takes_epochs and (held := Held.of(parts, self.width)):
                self._engine.prepare_epochs(self._stack, self._training.nest, parts, held.most)
                self._held = held
                self.in_flight = 2 if self.schedules else len(parts) * held.most
            else:
                self._engine.prepare(self._stack, self._training.nest, sorted(shapes, reverse=True))
        self._prepare_s = time.perf_counter() - began

    def _most(self, fit: Fit) -> int:
        return 1 if fit.moments.each_batch else MAX_CHUNK_STEPS

    # Stepping

    def advance(self, chunk: Chunk) -> Ticket:
        """Enqueues as many of the chunk's steps as one launch may cover."""
        errors = self._begin(chunk)
        if errors:
            raise StepFailure(Ticket(chunk.shortened(0), None), errors)
        steps = self._steps(chunk)
        done = chunk.shortened(steps)
        seen = Seen()
        feed = self._feed(done)
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
        seen.launch = Launch(logs, chunk.steps)

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
            self._enqueued, self._training.nest, orders, active, held.full
        )
        launch = Launch(logs, sum(chunk.steps for chunk, _, _ in taken))
        for position, (_, _, seen) in enumerate(taken):
            seen.launch, seen.epoch = launch, position // len(held.parts)

    def _begin(self, chunk: Chunk) -> dict[int, BaseException]:
        """Training's and the epoch's beginning, for rows that stand there."""
        errors: dict[int, BaseException] = {}
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            fit = self._fits[row]
            moments = fit.moments
            try:
                if not moments.has_begun:
                    moments.begin(fit.course.batches)
                    self._moment(row, "on_train_begin")
                if cursor.batch == 0:
                    self._moment(row, "on_epoch_begin", fit.options.initial_epoch + cursor.epoch)
                if moments.each_batch:
                    self._moment(row, "on_train_batch_begin", cursor.batch)
            except Exception as error:
                errors[row] = error
        return errors

    def _after_batch(self, ticket: Ticket) -> Ticket:
        """Callbacks that see every batch see this one; one of them may end training here."""
        watched = [row for row in ticket.chunk.rows if self._fits[row].moments.each_batch]
        if not watched:
            return ticket
        shown = self._seen(ticket).read(self._engine)
        chunk, errors = ticket.chunk, {}
        for row in watched:
            cursor = chunk.cursors[chunk.rows.index(row)]
            logs = {name: float(values[row]) for name, values in shown.items()}
            try:
                self._moment(row, "on_train_batch_end", cursor.batch, logs=logs)
            except Exception as error:
                errors[row] = error
        if errors:
            raise StepFailure(ticket, errors)
        stopped = [row for row in watched if self._fits[row].moments.stops and row not in chunk.ends]
        if not stopped:
            return ticket
        ends = tuple(row for row in chunk.rows if row in chunk.ends or row in stopped)
        cut = Chunk(chunk.rows, chunk.cursors, chunk.size, chunk.steps, ends)
        return Ticket(cut, ticket.payload)

    def _steps(self, chunk: Chunk) -> int:
        """Lengths that there is a program for, or powers of two: each other one would have to be compiled."""
        most = min(self._most(self._fits[row]) for row in chunk.rows)
        steps = min(chunk.steps, most)
        known = [length for length, size in self._shapes if size == chunk.size and length <= steps]
        return max(known) if known else 1 << (steps.bit_length() - 1)

    def _feed(self, chunk: Chunk) -> Feed:
        order = np.zeros((self.width, chunk.steps, chunk.size), np.int32)
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            start = cursor.batch * self._fits[row].job.batch_size
            taken = self._order(row, cursor.epoch)[start : start + chunk.steps * chunk.size]
            order[row] = taken.reshape(chunk.steps, chunk.size)
        return Feed(self._training.nest, order)

    def _order(self, row: int, epoch: int) -> np.ndarray:
        """The positions in the pool that a row reads in an epoch."""
        if (row, epoch) not in self._orders:
            fit = self._fits[row]
            for stale in [key for key in self._orders if key[0] == row and key[1] < epoch]:
                del self._orders[stale]
            order = self._shuffled(fit, fit.options.initial_epoch + epoch)
            if fit.job.index is not None:
                order = fit.index[order]
            self._orders[row, epoch] = (order + self._training.starts[row]).astype(np.int32)
        return self._orders[row, epoch]

    def _shuffled(self, fit: Fit, epoch: int) -> np.ndarray:
        """Rows of one seed and length share an order."""
        length = fit.course.length
        if not fit.job.shuffle:
            return np.arange(length)
        wanted = (fit.job.seed, length, epoch // _SHUFFLED)
        if wanted not in self._shuffles:
            if len(self._shuffles) > 2 * self.width:
                self._shuffles.clear()
            first = epoch // _SHUFFLED * _SHUFFLED
            self._shuffles[wanted] = batch_orders(fit.job.seed, range(first, first + _SHUFFLED), length)
        return self._shuffles[wanted][epoch % _SHUFFLED]

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
            MetricRow(
                row,
                chunk.steps,
                samples=1 if row in chunk.ends else 0,
                sums={name: float(values[row]) for name, values in shown.items()}
                if row in chunk.ends
                else {},
            )
            for row in chunk.rows
        )

    # Epochs

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        wanted = [row for row in rows if self._fits[row].validates(self._epochs(row))]
        if not wanted or self._validation is None:
            return ()
        for row in wanted:
            self._moment(row, "on_test_begin")
        active = np.zeros(self.width, bool)
        active[wanted] = True
        self._stack, logs = self._engine.test(self._stack, self._validation_feeds(wanted), active)
        shown = self._engine.read(logs)
        found = []
        for row in wanted:
            own = {name: float(values[row]) for name, values in shown.items()}
            self._moment(row, "on_test_end", logs=own)
            found.append(MetricRow(row, 0, 1, own))
        return tuple(found)

    def _epochs(self, row: int) -> int:
        """The epoch that a row is about to end, counted from 0."""
        return self._fits[row].moments.epochs_ended

    def _validation_feeds(self, rows: Sequence[int]) -> list[Feed]:
        fit = self._fits[rows[0]]
        assert self._validation is not None
        assert fit.validation is not None
        length, size = fit.validation.length, min(fit.validation_batch, fit.validation.length)
        whole = length // size * size
        positions = self._validation.starts[:, None] + np.arange(length, dtype=np.int32)
        feeds = [Feed(self._validation.nest, positions[:, :whole].reshape(self.width, -1, size))]
        if whole < length:
            feeds.append(Feed(self._validation.nest, positions[:, None, whole:]))
        return feeds

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Keras' end of an epoch, and of training after the last; what callbacks added to the logs."""
        fit = self._fits[row]
        epoch = self._epochs(row)
        moments = fit.moments
        with self._at_home(row) if moments.has("on_epoch_end") else nullcontext():
            added = moments.end_epoch(fit.options.initial_epoch + epoch, metrics)
        if moments.stops or epoch + 1 == fit.course.epochs:
            finalizes = bool(getattr(fit.model.optimizer, "use_ema", False))
            with self._at_home(row) if finalizes or moments.has("on_train_end") else nullcontext():
                if finalizes:
                    fit.model.optimizer.finalize_variable_values(fit.model.trainable_weights)
                moments.at("on_train_end", logs={**metrics, **added})
        return added

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
    def _at_home(self, row: int) -> Any:
        """Inside, the row's model holds its state; what is changed there goes on from there."""
        self._engine.put(self._stack, row)
        yield
        self._stack = self._engine.take(self._stack, row)

    # States

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing: restoring the best weights is a callback's, EarlyStopping(restore_best_weights=True)."""

    def revert(self, rows: Sequence[int]) -> None:
        return

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        """The rows' models hold it."""
        self._engine.put_all(self._stack, rows)
        return tuple(JobState(Cursor(), {}) for _ in rows)

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
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
        """The first step of one row beside its model's own: rows of one signature differ in numbers alone."""
        row = rows[0]
        if self.width == 1 or self._key in _checked:
            return Check(0, 0.0, None)
        feed = self._feed(chunk.shortened(1))
        alone = self._engine.step_alone(row, feed)
        if alone is None:
            return Check(0, 0.0, None)
        every = np.ones(self.width, bool)
        trial = self._engine.stack()
        first = np.zeros(self.width, np.int64)
        trial, logs = self._engine.train(trial, feed, every, every, first)
        together = self._engine.after_step(trial, row, logs)
        check = _compared(self._fits[row], alone, together)
        if check.mismatch is None:
            _checked.add(self._key)
        return check

    def resize(self, width: int) -> Mapping[int, int]:
        kept = [row for row in range(self.width) if row not in self._left][:width]
        free = [row for row in range(self.width) if row in self._left]
        kept += free[: width - len(kept)]
        moved = {row: i for i, row in enumerate(kept)}
        self._stack = self._engine.narrow(self._stack, kept)
        self._training = self._training.of(kept)
        self._validation = self._validation and self._validation.of(kept)
        self._fits = {moved[row]: self._fits[row] for row in kept}
        self._orders = {(moved[row], epoch): o for (row, epoch), o in self._orders.items() if row in moved}
        self._left = {moved[row] for row in kept if row in self._left}
        self._start, self.width = {}, width
        if self._held is not None:
            self._held = Held.of(self._held.parts, width)
        return moved

    def disturbed(self, row: int) -> str | None:
        return None  # a callback may change its model: what it changes is taken up

    def abandon(self) -> None:
        """Models that no callback has seen still hold what they came with."""
        for row, fit in self._fits.items():
            if row not in self._left:
                self._engine.revert(row)
                if row in self._start:
                    fit.model.set_weights(self._start[row])

    def timing(self) -> tuple[float, float]:
        """No step's time: chunks are not cut to a slice, for each other length would have to be compiled."""
        return 0.0, self._prepare_s

    def close(self) -> None:
        self._engine.close()
        self._stack = None


def _shapes(course: Course, most: int) -> list[tuple[int, int]]:
    """The launches of an epoch: full batches in as few as may be, and the short last one."""
    whole, tail = divmod(course.length, course.batch_size)
    made = []
    if whole:
        made.append((min(whole, most), course.batch_size))
        if whole > most and whole % most:
            made.append((whole % most, course.batch_size))
    return [*made, (1, tail)] if tail else made


def _compared(fit: Fit, alone: Mapping[str, Any], together: Mapping[str, Any]) -> Check:
    worst, mismatch = 0.0, None
    for (path, ours), theirs in zip(alone.items(), together.values(), strict=True):
        difference = float(np.max(np.abs(ours - theirs), initial=0.0))
        worst = max(worst, difference)
        if not np.allclose(theirs, ours, rtol=_RTOL, atol=_ATOL, equal_nan=True) and mismatch is None:
            mismatch = f"{fit.job.name!r}: {path} differs by {difference:.1e} after a step"
    return Check(1, worst, mismatch)
