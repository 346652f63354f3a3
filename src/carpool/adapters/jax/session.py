"""Members of one structure stepped by compiled programs: a stack on the device, its rows the members. A job alone is a stack of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.base import (
    Check,
    FusedSession,
    JobState,
    MetricColumns,
    MetricRow,
    Prepared,
    Ticket,
)
from carpool.adapters.jax import program, programs
from carpool.adapters.jax.build import Built
from carpool.adapters.jax.check import compared, floating, is_unproven
from carpool.adapters.jax.cost import most_steps
from carpool.adapters.jax.formulation import Trials, candidates, convolves, length_limit
from carpool.adapters.jax.functions import Functions, sizes, typed
from carpool.adapters.jax.keys import steps_keys
from carpool.adapters.jax.lift import lifted
from carpool.adapters.jax.pool import Store
from carpool.adapters.jax.program import Formulation, State
from carpool.adapters.jax.reading import Reading
from carpool.adapters.jax.recipe import Recipes
from carpool.adapters.jax.state import loaded, stacked, taken, unstacked
from carpool.adapters.jax.streams import Streamed
from carpool.adapters.jax.taking import Taking
from carpool.adapters.jax.validation import Validation
from carpool.fidelity import Proof, lowest
from carpool.job import Job
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk, Cursor, Supply
from carpool.planning.trials import Trial

_TIMED_STEPS = 4


class StackedSession(FusedSession):
    """A group of jobs on a device. The stack holds the truth; the user's objects are as they came until a row leaves."""

    def __init__(
        self,
        builts: Sequence[Built],
        recipes: Recipes,
        store: Store,
        device: Any,
        prepared: Prepared = lambda *_: None,
    ) -> None:
        self._builts = list(builts)
        self._recipes, self._store, self._device = recipes, store, device
        self.width = len(builts)
        self._is_streamed = isinstance(builts[0].data, Streamed)
        self._reading: Reading | Taking = (
            Taking(builts, device) if self._is_streamed else Reading(builts, store, device)
        )
        self._validation = Validation(builts, store, device)
        self._state: Any = self._placed(
            stacked([State(b.parts.trained, b.parts.rest, b.state) for b in builts])
        )
        self._keys = self._placed(steps_keys([built.job.seed for built in builts]))
        self._best: Any = None
        self._functions = Functions(builts, recipes)
        self._mine: dict[Any, tuple[Any, Any]] = {}
        """The rows' own numbers on the device, and the program, by what tells programs of this stack apart."""
        self._left: set[int] = set()
        self._unread: dict[int, Any] = {}
        """Who was sound after each launch whose metrics nobody has read yet."""
        self._batches: dict[int, int] = {}
        """Whole batches of a size in the longest epoch."""
        self._launch_s, self._prepare_s = 0.0, 0.0
        self._prepared = prepared
        first = max(size for built in builts for size in sizes(built))
        gradient = self._functions.gradient(first).traced
        self._convolves = convolves(gradient)
        self._most = most_steps(gradient.closed, self.width, device.platform, MAX_CHUNK_STEPS)
        self._way = self._formulated()
        if self._way is not None:
            self._prepare()

    def _formulated(self) -> Formulation | None:
        """How the rows are computed, as far as that is known; without a trial, convolutions in the way that is likely to be good."""
        if self.width == 1:
            return program.ALONE
        if not self._convolves:
            return program.MAPPED
        found = self._trials().remembered()
        return self._trials().best(found)[0] if found else None

    def _trials(self) -> Trials:
        size = max(size for built in self._builts for size in sizes(built))
        functions = (self._functions.gradient(size).key, self._functions.update().key)
        return Trials((functions, size), self.width, self._device)

    @property
    def _chosen_way(self) -> Formulation:
        return self._way or candidates(self._device.platform)[0]

    def _placed(self, nest: Any) -> Any:
        return jax.device_put(nest, self._device)

    # Programs

    def _prepare(self) -> None:
        """Programs for the first epoch, compiled side by side while others are opened."""
        began = time.perf_counter()
        for size in sorted({size for built in self._builts for size in sizes(built)}, reverse=True):
            cursors = tuple(Cursor() for _ in self._builts)
            chunk = Chunk(tuple(range(self.width)), cursors, size, self._length(size))
            self._training(chunk)
        self._prepare_s = time.perf_counter() - began

    def _length(self, size: int) -> int:
        """Steps in a launch: an epoch's in as few equal parts as may be. A launch may end with steps that nobody takes."""
        if self._is_streamed:
            return 1
        if size not in self._batches:
            whole = [b.data.length // size for b in self._builts if b.job.batch_size == size]
            self._batches[size] = max(whole, default=1)
        batches, most = self._batches[size], self._most
        if self._convolves:
            most = length_limit(self._chosen_way, self._device.platform, most)
        parts = -(-batches // most)
        return max(1, -(-batches // max(1, parts)))

    def _training(self, chunk: Chunk, way: Formulation | None = None, steps: int = 0) -> Any:
        """The program of such chunks, and its inputs but for who runs how far."""
        size, way, donated = chunk.size, way or self._chosen_way, not steps
        steps = steps or self._length(chunk.size)
        gradient, update = self._functions.gradient(size), self._functions.update()
        order = self._reading.order(chunk)
        shared = self._reading.is_shared and self.width > 1
        flags, zeros = np.zeros(self.width, bool), np.zeros(self.width, np.uint32)
        wanted = (way.name, steps, size, shared, donated)
        if wanted not in self._mine:
            numbers = self._placed((gradient.columns, update.columns))
        else:
            numbers, _ = self._mine[wanted]
        inputs = (self._state, self._reading.nest, order, self._keys, zeros, numbers, flags, np.int32(0))
        if wanted not in self._mine:

            def make() -> Any:
                return program.training(gradient, update, steps, size, way, shared)

            key = ("train", *wanted, gradient.key, update.key)
            self._mine[wanted] = (numbers, programs.program(key, make, typed(inputs), donated=donated))
        return self._mine[wanted][1], inputs

    # Stepping

    def advance(self, chunk: Chunk) -> Ticket:
        """Enqueues as many of the chunk's steps as one launch covers."""
        done = chunk.shortened(min(chunk.steps, self._length(chunk.size)))
        self._state, *shown = self._launched(done)
        self._unread[id(shown)] = shown[-1]
        self._reading.taken()
        return Ticket(done, shown)

    def _launched(self, chunk: Chunk) -> Any:
        """The chunk enqueued: the state afterwards, sums, steps taken and who is sound.

        A row that diverged in a launch before this one stays as it is, also where nobody knows of it yet.
        """
        compiled, inputs = self._training(chunk)
        active: Any = np.zeros(self.width, bool)
        first, rows = np.zeros(self.width, np.uint32), list(chunk.rows)
        active[rows], first[rows] = True, [cursor.step & 0xFFFFFFFF for cursor in chunk.cursors]
        for sound in self._unread.values():
            active = active & sound
        if not compiled.done():
            began = time.perf_counter()
            compiled.result()
            self._prepare_s = max(self._prepare_s, time.perf_counter() - began)
            self._prepared(chunk.size, self.width, "compiled", time.perf_counter() - began)
        run = compiled.result()
        return run(*typed((*inputs[:4], first, inputs[5], active, np.int32(chunk.steps))))

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        assert isinstance(self._reading, Taking)
        return self._reading.supply(rows)

    def depth(self, row: int) -> tuple[int, int] | None:
        return self._reading.depth() if isinstance(self._reading, Taking) else None

    def done(self, ticket: Ticket) -> bool:
        return ticket.payload is None or all(leaf.is_ready() for leaf in jax.tree.leaves(ticket.payload))

    def metrics(self, ticket: Ticket) -> MetricColumns:
        sums, taken, sound = jax.device_get(ticket.payload)
        self._unread.pop(id(ticket.payload), None)
        rows, size = ticket.chunk.rows, ticket.chunk.size
        chosen = slice(None) if rows == tuple(range(self.width)) else np.asarray(rows)
        steps = taken[chosen].astype(np.int64)
        columns = {name: values[chosen].astype(np.float64) for name, values in sums.items()}
        return MetricColumns(rows, steps, steps * size, columns, ~sound[chosen])

    # Epochs

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        return self._validation.evaluate(rows, self._state, self._keys, self._functions, self._chosen_way)

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        return

    def keep(self, rows: Sequence[int]) -> None:
        if rows:
            now = (self._state.trained, self._state.rest)
            self._best = self._chosen(rows, now, now if self._best is None else self._best)

    def revert(self, rows: Sequence[int]) -> None:
        """Weights, and what the model holds beside them; the optimizer stays where training ended."""
        if rows and self._best is not None:
            trained, rest = self._chosen(rows, self._best, (self._state.trained, self._state.rest))
            self._state = State(trained, rest, self._state.optimizer)

    def _chosen(self, rows: Sequence[int], new: Any, old: Any) -> Any:
        """A nest with these rows from one and the others from another, in arrays of its own."""
        mask = np.zeros(self.width, bool)
        mask[list(rows)] = True
        return jax.tree.map(lambda a, b: jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)

    # States

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        host = jax.device_get(self._state)
        return unstacked(host, rows)

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        self._left |= set(rows)
        return taken(self._state, rows)

    def load(self, row: int, state: JobState) -> None:
        host = jax.device_get(self._state)
        self._state = self._placed(loaded(host, row, state))

    def join(self, row: int, job: Job, state: JobState | None = None) -> None:
        raise NotImplementedError("JAX stacks take no new members yet")

    def copy(self, source: int, target: int) -> None:
        self._state = jax.tree.map(lambda leaf: leaf.at[target].set(leaf[source]), self._state)

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        raise NotImplementedError("call the models")

    # What only groups need

    def check(self, chunk: Chunk, rows: Sequence[int]) -> Check:
        """The rows' functions are one, number by number: so they were traced, all of them. Later, and where an operation is not JAX's own,
        the chunk's first step is also compared with each row's step alone. The stack stays as it is.
        """
        is_first = all(cursor.step == 0 for cursor in chunk.cursors)
        own = self._functions.gradient(chunk.size).traced.closed.jaxpr
        if self.width == 1 or (is_first and not is_unproven(own)):
            return Check(len(chunk.rows), proof=Proof.TRACES) if self.width > 1 else Check()
        before = self._state
        self._state = jax.tree.map(jnp.copy, before)  # a launch writes over the state that it is given
        try:
            after = jax.device_get(self._launched(chunk.shortened(1))[0].trained)
        finally:
            self._state = before
        start = jax.device_get(before.trained)
        update = self._functions.update().traced.closed.jaxpr
        least = lowest({*floating(own), *floating(update)})
        return Check.of(
            [
                compared(self._name(row), _row(start, row), self._alone(row, chunk), _row(after, row), least)
                for row in rows
            ]
        )

    def _name(self, row: int) -> str:
        return str(self._builts[row].job.name)

    def _alone(self, row: int, chunk: Chunk) -> Any:
        """The row's weights after its first step of the chunk, by a program of its own function."""
        built, cursor = self._builts[row], chunk.cursors[chunk.rows.index(row)]
        gradient = lifted([self._recipes.gradient(built, chunk.size)])
        update = lifted([self._recipes.update(built)])
        order = self._reading.order(chunk)
        place = 0 if self._reading.is_shared else row
        own = program.Order(order.places[place : place + 1], order.offsets[row : row + 1])
        state = jax.tree.map(lambda leaf: leaf[row : row + 1], self._state)
        first, ones = np.asarray([cursor.step & 0xFFFFFFFF], np.uint32), np.ones(1, bool)
        keys = self._keys[row : row + 1]
        inputs = typed((state, self._reading.nest, own, keys, first, ((), ()), ones, np.int32(1)))
        key = ("alone", chunk.size, gradient.key, update.key)

        def make() -> Any:
            return program.training(gradient, update, 1, chunk.size, program.ALONE, False)

        after, *_ = programs.program(key, make, inputs, donated=False).result()(*inputs)
        return _row(jax.device_get(after.trained), 0)

    def resize(self, width: int) -> Mapping[int, int]:
        kept = [row for row in range(self.width) if row not in self._left][:width]
        free = [row for row in range(self.width) if row in self._left]
        kept += free[: width - len(kept)]
        moved = {row: place for place, row in enumerate(kept)}
        chosen = np.asarray(kept)
        self._state, self._keys = jax.tree.map(lambda leaf: leaf[chosen], (self._state, self._keys))
        if self._best is not None:
            self._best = jax.tree.map(lambda leaf: leaf[chosen], self._best)
        self._unread = {place: sound[chosen] for place, sound in self._unread.items()}
        self._builts = [self._builts[row] for row in kept]
        self._left = {moved[row] for row in kept if row in self._left}
        self._reading.narrow(kept)
        self._functions, self._mine, self._batches = Functions(self._builts, self._recipes), {}, {}
        self._validation = Validation(self._builts, self._store, self._device)
        self.width = width
        self._way = program.ALONE if width == 1 else self._chosen_way
        return moved

    def trial(self, chunk: Chunk) -> Trial | None:
        """Of convolutions: which formulation is the fastest, beside a member alone. Anything else gains from a stack."""
        if not self._convolves or self.width == 1:
            return None
        trials = self._trials()
        found = trials.remembered()
        if not found:
            steps = 1 if self._device.platform == "cpu" else _TIMED_STEPS
            for way in candidates(self._device.platform):
                self._training(chunk, way, steps)  # compiled side by side
            found = self._measured(trials, chunk, steps)
        if not found:  # the windows disagree: the way that is likely to be good
            self._way = self._chosen_way
            self._prepare()
            return None
        self._way, best = trials.best(found)
        self._prepare()
        return best

    def _measured(self, trials: Trials, chunk: Chunk, steps: int) -> Mapping[str, Trial]:
        one = Chunk((0,), chunk.cursors[:1], chunk.size, 1)
        alone = StackedSession(self._builts[:1], self._recipes, self._store, self._device)
        try:
            runs = {way.name: self._timed(chunk, way, steps) for way in trials.ways}
            return trials.measured(runs, alone._timed(one, program.ALONE, steps))
        finally:
            alone.close()

    def _timed(self, chunk: Chunk, way: Formulation, steps: int) -> Callable[[], float]:
        """What returns the seconds of a step, by a program that leaves the stack as it is."""
        compiled, inputs = self._training(chunk, way, steps)
        run, given = compiled.result(), (*inputs[:6], np.ones(self.width, bool), np.int32(steps))

        def timed() -> float:
            began = time.perf_counter()
            jax.block_until_ready(run(*typed(given)))
            return (time.perf_counter() - began) / steps

        return timed

    def disturbed(self, row: int) -> str | None:
        return None  # arrays do not change, and the stack has its own

    def abandon(self) -> None:
        """The user's objects are as they came."""

    def timing(self) -> tuple[float, float]:
        return self._launch_s, self._prepare_s

    def close(self) -> None:
        self._reading.close()
        self._state = self._best = None


def _row(nest: Any, row: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[row], nest)
