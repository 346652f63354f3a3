"""The fused session: many jobs of one structure, a row each, advanced by one launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from carpool import recall
from carpool.adapters.base import (
    Check,
    DeviceFull,
    FusedSession,
    JobState,
    MetricColumns,
    MetricRow,
    Prepared,
    Reading,
    StepFailure,
    Ticket,
    Told,
)
from carpool.adapters.torch import stack
from carpool.adapters.torch.absorb import restore_into
from carpool.adapters.torch.behaviour import job_signature
from carpool.adapters.torch.check import try_step
from carpool.adapters.torch.clock import Clock, Receipt, Stream
from carpool.adapters.torch.epochs import Epochs
from carpool.adapters.torch.feed import Feed
from carpool.adapters.torch.full import is_full
from carpool.adapters.torch.hypers import Ahead, Hypers
from carpool.adapters.torch.launch import OutOfBounds, Resident
from carpool.adapters.torch.pace import alone_step, pace_key, shortest
from carpool.adapters.torch.panels import panels_of
from carpool.adapters.torch.program import Program
from carpool.adapters.torch.programs import FEWEST_LAUNCHES, Programs
from carpool.adapters.torch.stacked import Recipe, train_step
from carpool.adapters.torch.store import Pool, Store
from carpool.adapters.torch.streams import Streamed
from carpool.adapters.torch.threads import Threads
from carpool.adapters.torch.told import Shown
from carpool.adapters.torch.transfer import sent
from carpool.adapters.torch.validation import Validation
from carpool.adapters.torch.verify import RowsRaised, Verifier
from carpool.adapters.torch.window import Window
from carpool.errors import described, failure
from carpool.job import Job, share_of
from carpool.memory import heap
from carpool.planning.cursor import Chunk, Stretch, Supply, launches
from carpool.planning.trials import Form, Trial
from carpool.planning.widths import spread
from carpool.windows import measured

if TYPE_CHECKING:
    from carpool.adapters.torch.fuse import Known

Tensors = dict[str, Tensor]

_EAGER_S = 60e-6
"""No step runs faster than this operator by operator."""
_CONFIRMED = 16  # members whose step alone is compared with a compiled step before it is taken up


class StackedSession(FusedSession):
    """Stacked weights, one traced step; members come and go by rows."""

    def __init__(
        self,
        recipe: Recipe,
        known: Sequence[Known],
        width: int,
        device: str,
        store: Store,
        compile: str | bool,
        prepared: Prepared,
        lookup: Callable[[Job], Known],
        stacks: int = 1,
        threads: Threads | None = None,
    ) -> None:
        """`stacks` of this width run the same steps: each step is compiled once for all of them."""
        self._recipe, self._layout = recipe, recipe.layout
        self._first = known[0]
        self._panels = panels_of(self._first, recipe, width, device)
        self.width, self._device, self._store = self._panels.width, device, store
        self._known: list[Known | None] = [*known, *[None] * (self.width - len(known))]
        self._lookup, self._stacks = lookup, stacks
        self._threads = threads or Threads()
        self._pool = Pool([member.built.data for member in known])
        self._window = make_window(known)
        self._hypers = Hypers(self._layout, [member and member.built for member in self._known])
        self.schedules = _steps_by_epoch(known)
        key = (self._first.signature, recipe.sharing)
        most = partial(getattr, self._threads, "most")  # not the session itself: that would be a circle
        self._programs = Programs(key, self._panels, device, compile, prepared, width > 1, most)
        if (found := recall.remembered(self._pace_key())) is not None:
            self._programs.remembered = found.form
        self._best: Tensors = {}
        self._dead: set[int] = set()
        self._versions: dict[int, list[int]] = {}
        self._peak_bytes: int | None = None
        self._took_s: dict[int, float] = {}
        """Seconds of a launch by its batch size: beside other streams one takes longer, so the shortest that was seen."""
        self._busy_s = 0.0
        self._raw = self._allocated(known)
        self._epochs: Epochs | None = None
        self._feed = Feed(
            recipe, self._raw, self._known, self._first.course.batch_size, self._hypers, self._window
        )
        self._validation = self._validated()
        self._fill(range(len(known)), [stack.initial_states(member.built) for member in known])
        stack.fill_up(self._tensors, len(known))
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(device)
        else:
            heap.keep()
        jobs = [member.built.job for member in known]
        self._stream = Stream(device, max(job.priority for job in jobs), share_of(jobs))
        try:
            if self._window is not None:
                self._window.open([member.built for member in known])
        except BaseException:  # a session that cannot be opened holds up nobody
            self._stream.close()
            raise

    @property
    def note(self) -> str:  # type: ignore[override]  # what is known when a member has ended
        return self._programs.note or self._threads.note

    @property
    def _tensors(self) -> Tensors:
        """The stack's tensors, once everything that it was told has been computed."""
        if self._epochs is not None:
            self._epochs.settle()
        return self._raw

    @property
    def in_flight(self) -> int:  # type: ignore[override]  # of machine code, as many chunks as a launch or two
        return self._epochs.in_flight if self._epochs is not None else 2

    def _begin_codes(self) -> None:
        """Begins to make the machine code of all steps that a long run will take."""
        if not self._is_long_here:
            return
        for size in launches([member.course for member in self._known if member]).by_size:
            self._programs.begin("train", size, self._raw, self._recipe)
        for kind, size, tensors in self._validated_by():
            self._programs.begin(kind, size, tensors, self._recipe)

    @cached_property
    def _is_long_here(self) -> bool:
        """Whether a run is on a CPU and so long that its steps may be machine code."""
        if self._device != "cpu" or self._window is not None:
            return False
        sizes = launches([member.course for member in self._known if member]).by_size
        return max(sizes.values(), default=0) >= FEWEST_LAUNCHES

    def _validated_by(self) -> Iterator[tuple[str, int, Tensors]]:
        """The kind, batch size and tensors of each step of validation."""
        if self._validation is not None:
            for size in self._validation.sizes(self._first.course.batch_size):
                yield self._validation.kind, size, self._validation.tensors

    def preparing(self, chunk: Chunk) -> Callable[[], bool] | None:
        if not self._is_long_here:
            return None
        steps = [("train", chunk.size, self._raw)]
        if chunk.ends and self._epochs is not None:
            steps += self._validated_by()
        found = [self._programs.under_way(*step, self._recipe) for step in steps]
        waits = [is_through for is_through in found if is_through is not None]
        return (lambda: all(is_through() for is_through in waits)) if waits else None

    def turn(self) -> AbstractContextManager[object]:
        if self._device != "cpu":
            return self._stream.turn()
        return self._threads.inside(beside=self._epochs is not None)

    def _settled(self) -> AbstractContextManager[object]:
        """While an operation after another runs, and no launch beside them."""
        return self._threads.settled() if self._epochs is not None else nullcontext()

    # Opening

    def _allocated(self, known: Sequence[Known]) -> Tensors:
        built, shared = self._first.built, self._recipe.shared
        tensors = stack.state_tensors(
            self._layout, built, self.width, len(self._recipe.values), self._device, shared
        )
        tensors |= stack.shared_tensors(built, shared, torch.Tensor.to, self._device)
        tensors |= stack.feed_tensors(
            self._layout, self._first.built, self._panels, len(self._recipe.values), self._device
        )
        if self._window is not None:
            arrays, longest = self._window.arrays(self._device), self._window.length
        else:
            arrays = self._pool.arrays(self._store, self._device)
            longest = max(member.course.length for member in known)
        order = torch.zeros(self.width, longest, dtype=torch.int32, device=self._device)
        return tensors | {f"data:{i}": array for i, array in enumerate(arrays)} | {"order": order}

    def _validated(self) -> Validation | None:
        held = {row: m.built.validation for row, m in enumerate(self._known) if m and m.built.validation}
        return Validation(self._recipe, self._raw, held, self._store, self._device) if held else None

    def _fill(self, rows: Sequence[int], states: Sequence[JobState]) -> None:
        stack.write_rows(self._layout, self._tensors, rows, states)
        seeds = torch.tensor([self._member(row).built.seed for row in rows], device=self._device)
        self._tensors["seeds"][torch.tensor(list(rows), device=self._device)] = seeds
        self._dead -= set(rows)
        self._leave_gathering()  # it was of those who were there before
        for row in rows:
            built = self._member(row).built
            self._versions[row] = _versions(built.model)
            if self._window is not None and isinstance(built.data, Streamed):
                self._feed.orders.set(row, self._window.positions(built.data), False, built.seed)
            else:
                self._feed.orders.set(row, self._pool.positions(built.data), built.job.shuffle, built.seed)

    def _member(self, row: int) -> Known:
        member = self._known[row]
        assert member is not None, f"row {row} is free"
        return member

    # Training

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        return self._feed.supply(rows)

    def depth(self, row: int) -> tuple[int, int] | None:
        return self._feed.depth(row)

    def advance(self, chunk: Chunk) -> Ticket:
        self._take_compiled(chunk)
        ahead = self._feed.ahead(chunk)
        if (resident := self._resident(chunk)) is not None and not ahead.errors:
            is_first = self._epochs is None
            shown = self._gather().train(chunk, ahead, resident)
            if is_first:  # while these steps run
                self._gather().launch()
                self._begin_codes()
            return Ticket(chunk, (shown, ahead, None))
        self._settle()
        try:
            self._feed.tell(chunk, chunk.steps)
            self._feed.lay(ahead)
        except Exception as error:
            raise (DeviceFull(self._stopped(chunk, ahead), error) if is_full(error) else error) from error
        if ahead.errors:
            raise StepFailure([self._ticket(chunk.shortened(0), ahead)], ahead.errors)
        clock, program = Clock(self._device), None
        try:
            with self._settled():
                program = self._train_program(chunk.size)
                clock = Clock(self._device)  # preparing a step is not part of running it
                program.run(chunk.steps)
        except BaseException as error:
            failure(error)
            if is_full(error):
                is_whole = program is None or program.whole()
                raise DeviceFull(self._stopped(chunk, ahead) if is_whole else (), error) from error
            raise self._failure(chunk, ahead, error, program) from error
        self._feed.used(chunk, chunk.steps)
        return self._ticket(chunk, ahead, clock.stop())

    def advance_epochs(self, stretch: Stretch) -> Told | None:
        if self._epochs is None:
            return None
        return self._epochs.stretch(
            stretch, partial(self._feed.ahead_of, stretch), self._programs.resident, self._validation
        )

    def _resident(self, chunk: Chunk) -> Resident | None:
        """The chunk's steps as machine code, where that is ready."""
        if self._window is not None or self._device != "cpu":
            return None
        return self._programs.resident("train", chunk.size)

    def _gather(self) -> Epochs:
        """What gathers chunks into launches of machine code."""
        if self._epochs is None:
            self._epochs = Epochs(self._recipe, self._raw, self._feed, self._hypers.clip)
        return self._epochs

    def _settle(self) -> None:
        if self._epochs is not None:
            self._epochs.settle()

    def _leave_gathering(self) -> None:
        """Everything that was told is computed; what comes is gathered anew."""
        if self._epochs is not None:
            epochs, self._epochs = self._epochs, None
            epochs.close()

    def _take_compiled(self, chunk: Chunk) -> None:
        """Goes on with the compiled step once it is there, if members alone agree with it; else the traced one stays."""
        if not self._programs.is_compiling("train", chunk.size):
            return
        if any(
            cursor.batch and self._gathers(row) for row, cursor in zip(chunk.rows, chunk.cursors, strict=True)
        ):
            return  # half of an update's gradients are gathered
        program = self._programs.take_compiled("train", chunk.size)
        if program is None:
            return
        alive = self._tensors["alive"].tolist()
        try:
            mismatch = self.check(
                chunk, [row for row in spread(chunk.rows, _CONFIRMED) if alive[row]]
            ).mismatch
        except BaseException as error:
            failure(error)
            mismatch = described(error)
        if mismatch is not None:
            program.take_back(mismatch)
            self._took_s.clear()

    def _gathers(self, row: int) -> bool:
        return self._member(row).built.job.accumulate > 1

    def _ticket(self, chunk: Chunk, ahead: Ahead, clock: Clock | None = None) -> Ticket:
        shown = [
            self._tensors[name].to(torch.float64).view(self.width, -1) for name in ("sums", "taken", "alive")
        ]
        self._peak_bytes = None
        return Ticket(chunk, (Receipt(torch.cat(shown, 1)), ahead, clock))

    def done(self, ticket: Ticket) -> bool:
        return ticket.payload[0].done()

    def busy_s(self) -> float:
        return self._busy_s

    def metrics(self, ticket: Ticket) -> MetricColumns:
        receipt, ahead, clock = ticket.payload
        shown: np.ndarray = receipt.read()
        if clock is not None:
            seconds = clock.seconds()
            self._busy_s += seconds
            size, launch_s = ticket.chunk.size, seconds / ticket.chunk.steps
            self._took_s[size] = min(launch_s, self._took_s.get(size, math.inf))
        rows, names = ticket.chunk.rows, self._recipe.values
        own = shown[self._feed.rows(ticket.chunk).place]
        steps, dead = own[:, -2].astype(np.int64), own[:, -1] == 0
        for place in np.flatnonzero(dead):
            if rows[place] not in self._dead:
                self._dead.add(rows[place])
                self._hypers.rewind(rows[place], int(steps[place]), ahead)
        sums = {name: own[:, column].astype(np.float64) for column, name in enumerate(names)}
        errors = self._raised(ticket, receipt) if isinstance(receipt, Shown) else {}
        return MetricColumns(rows, steps, steps * ticket.chunk.size, sums, dead, errors)

    def _raised(self, ticket: Ticket, shown: Shown) -> dict[int, BaseException]:
        """What rows of a launch that was gathered raised: their own step says it, from where they stand."""
        self._busy_s += shown.seconds
        errors: dict[int, BaseException] = {}
        faults = shown.faults[0]
        for row in np.flatnonzero(faults >= 0).tolist():
            chunk, steps = ticket.chunk.of({row}), int(faults[row])
            self._settle()
            self._feed.tell(chunk, 1)
            case = self._feed.case(row, chunk.cursors[0], steps, chunk.size)
            errors[row] = try_step(self._recipe, case) or OutOfBounds({row: steps})
            self._dead.add(row)
            self._hypers.rewind(row, steps, ticket.payload[1])
        return errors

    def _stopped(self, chunk: Chunk, ahead: Ahead, program: Program | None = None) -> list[Ticket]:
        """A chunk that went no further: panels before the one that raised are through, those after it have not begun."""
        tickets = []
        by_steps: dict[int, list[int]] = {}
        for row, steps in self._done(chunk.rows, program).items():
            by_steps.setdefault(steps, []).append(row)
        for steps, rows in by_steps.items():
            for row in rows:
                self._hypers.rewind(row, steps, ahead)
            part = chunk.of(frozenset(rows)).shortened(steps)
            self._feed.used(part, steps)
            tickets.append(self._ticket(part, ahead))
        return tickets

    def _failure(
        self, chunk: Chunk, ahead: Ahead, error: BaseException, program: Program | None
    ) -> BaseException:
        """Which rows raised in the step that failed: those it ran for, or could not be made ready for, are each tried alone.

        A failure nobody owns is the group's.
        """
        done, short = self._done(chunk.rows, program), self._short(program)
        errors: dict[int, BaseException] = {}
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            if program is not None and (self._panels.of(row) != program.at or (short and row not in short)):
                continue
            case = self._feed.case(row, cursor, done[row], chunk.size)
            if (own := try_step(self._recipe, case)) is not None:
                errors[row] = own
            elif row in short:
                errors[row] = error
        return StepFailure(self._stopped(chunk, ahead, program), errors) if errors else error

    def _done(self, rows: Sequence[int], program: Program | None) -> dict[int, int]:
        """How many steps of the launch each row has taken."""
        done = self._tensors["k"].tolist()
        return {row: done[self._panels.of(row)] for row in rows} | {
            row: steps for row, steps in self._short(program).items() if row in rows
        }

    def _short(self, program: Program | None) -> dict[int, int]:
        """The rows that raised by themselves, while their panel went on: how many steps they took."""
        if program is None:
            return {}
        return {program.at * self._panels.rows + row: steps for row, steps in program.short.items()}

    def _train_program(self, size: int) -> Program:
        return self._program("train", size, lambda: train_step(self._recipe, size), self._tensors)

    def _program(self, kind: str, size: int, make: Callable[[], Any], tensors: Tensors) -> Program:
        launches = partial(self._launches, kind, size)
        program = self._programs.get(kind, size, make, tensors, launches, self._recipe)
        if kind != "train":  # a training step is taken up between chunks, and looked at first
            self._programs.take_compiled(kind, size)
        return program

    def _launches(self, kind: str, size: int) -> int:
        """How many launches of this kind and size a whole run has, in all stacks that share its steps."""
        courses = [member.course for member in self._known if member]
        if kind == "train" or self._validation is None:
            return self._stacks * launches(courses).by_size.get(size, 0)
        return self._stacks * self._validation.launches(size, max(course.epochs for course in courses))

    # Between chunks

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        begun = self.begin_evaluating(rows)
        return tuple(begun.read()) if begun is not None else ()

    def begin_evaluating(self, rows: Sequence[int]) -> Reading | None:
        if self._validation is None:
            return None
        if self._epochs is not None:
            kind, size = self._validation.kind, self._first.course.batch_size
            ready = self._epochs.validate(
                rows, size, self._validation, lambda batch: self._programs.resident(kind, batch)
            )
            if ready is not None:
                return ready
        self._settle()
        try:
            with self._settled():
                return self._validation.begin(rows, self._first.course.batch_size, self._program)
        except Exception as error:
            raise (DeviceFull((), error) if is_full(error) else error) from error

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        self._hypers.end_epoch(row, metrics)

    def keep(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        index = sent(list(rows), self._device)
        for name in self._model_names():
            if name not in self._best:
                self._best[name] = self._tensors[name].clone()
            self._best[name][index] = self._tensors[name][index]

    def revert(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        index = sent(list(rows), self._device)
        for name in self._model_names():
            self._tensors[name][index] = self._best[name][index]

    def _model_names(self) -> list[str]:
        return [name for name in self._tensors if name == "weights" or name.startswith("buffer:")]

    # Checking

    def check(self, chunk: Chunk, rows: Sequence[int]) -> Check:
        try:
            return self._verifier().check(chunk, {row: self._member(row).built for row in rows})
        except RowsRaised as raised:
            stood = self._ticket(chunk.shortened(0), Ahead(self._hypers.now()))
            raise StepFailure([stood], raised.errors) from raised

    def _verifier(self) -> Verifier:
        alone = self._threads.of_one if self._device == "cpu" else nullcontext
        return Verifier(self._recipe, self._tensors, self._feed, self._train_program, alone)

    def trial(self, chunk: Chunk) -> Trial | None:
        key = self._pace_key()
        found = recall.remembered(key)
        if found is None:
            try:
                found, busy = self._tried(chunk)
            except BaseException as error:
                failure(error)  # what raises here raises again in the check, and is blamed on its row
                return None
            if found is None:
                return None
            recall.remember(key, found, busy)
        self._took_s.setdefault(chunk.size, found.together_s)  # so that the first chunk has its size, too
        return found

    def _pace_key(self) -> str:
        return self._threads.outside(lambda: pace_key(self._first, self._members(), self._device))

    def _tried(self, chunk: Chunk) -> tuple[Trial | None, bool]:
        """What was measured, None where the windows disagree; and whether the machine was busy."""
        found, busy = self._compared(chunk)
        if (
            found is None
            or found.pays
            or self._programs.take_compiled("train", chunk.size, wait=True) is None
        ):
            return found, busy
        return self._compared(chunk)  # it may be worth it compiled

    def _compared(self, chunk: Chunk) -> tuple[Trial | None, bool]:
        launch, form = self._launch(chunk)
        case = self._feed.case(chunk.rows[0], chunk.cursors[0], 0, chunk.size)
        step = alone_step(self._recipe, case, self._first.probe.random)
        if form == "resident" and (together_s := launch()) < _EAGER_S * self._members():
            # Its operators alone take longer to begin than that: one look is enough to say by how much.
            with Threads(1).inside():
                alone_s = shortest(step)
            self._took_s.setdefault(chunk.size, together_s)
            return Trial(self._members(), together_s, alone_s, form="resident"), False
        found = measured([launch, lambda: self._threads.outside(step)])
        self._took_s.setdefault(chunk.size, found.seconds[0])
        trial = Trial(
            self._members(),
            *found.seconds,
            compiled=form == "compiled",
            form="resident" if form == "resident" else "",
        )
        return trial if found.agrees else None, found.busy

    def _members(self) -> int:
        return sum(member is not None for member in self._known)

    def _launch(self, chunk: Chunk) -> tuple[Callable[[], float], Form]:
        """What takes one launch of the chunk, and keeps nothing, and returns its seconds; and how it runs."""
        self._feed.tell(chunk, 1)
        program = self._train_program(chunk.size)
        return program.launch_s, program.form

    # Rows in and out

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        members = [self._member(row).built for row in rows]
        return stack.read_rows(self._layout, self._tensors, rows, members)

    def load(self, row: int, state: JobState) -> None:
        restore_into(self._member(row).built, state)
        self._fill([row], [state])
        self._hypers.read(row)

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        states = self.state(rows)
        for row in rows:
            self._known[row] = None
            self._hypers.set(row, None)
        if self._window is not None:
            self._window.keep([member.built.data for member in self._known if member])
        return states

    def join(self, row: int, job: Job, state: JobState | None = None) -> None:
        known = self._lookup(job)
        if self._window is not None or self._recipe.shared or self._recipe.alike:
            raise ValueError(f"{job.name!r} cannot join a group whose members read or share the same")
        if self._known[row] is not None:
            raise ValueError(
                f"row {row} is taken by {self._member(row).built.job.name!r}; let it leave first"
            )
        if known.signature != self._first.signature:
            raise ValueError(f"{job.name!r} has another structure than this group")
        if not self._pool.holds(known.built.data) or known.course.length > self._tensors["order"].shape[1]:
            raise ValueError(
                f"{job.name!r} reads other arrays than this group; only jobs on the group's data can join it"
            )
        self._known[row] = known
        self.schedules |= _steps_by_epoch([known])
        self._hypers.set(row, known.built)
        if state is not None:
            restore_into(known.built, state)
        self._fill([row], [state or stack.initial_states(known.built)])
        self._hypers.read(row)

    def copy(self, source: int, target: int) -> None:
        for name, tensor in self._tensors.items():
            if stack.is_state(name) and name != "steps":
                tensor[target].copy_(tensor[source])
        self._tensors["alive"][target] = True

    def resize(self, width: int) -> Mapping[int, int]:
        occupied = [row for row, member in enumerate(self._known) if member is not None]
        if not 0 < len(occupied) <= width:
            raise ValueError(f"expected room for {len(occupied)} members, received width {width}")
        panels = panels_of(self._first, self._recipe, width, self._device)
        width = panels.width
        moved = {row: place for place, row in enumerate(occupied)}
        index = torch.tensor((occupied * width)[:width], device=self._device)
        rows = [name for name in self._tensors if not name.startswith(("data:", "shared:")) and name != "k"]
        self._leave_gathering()
        self._raw |= {name: self._raw[name].index_select(0, index) for name in rows}
        self._best = {name: best.index_select(0, index) for name, best in self._best.items()}
        self._known = [*(self._known[row] for row in occupied), *[None] * (width - len(occupied))]
        self._hypers = self._hypers.moved(occupied, width)
        self._feed = self._feed.moved(index.tolist(), self._known, self._hypers)
        self._tensors["first"].zero_()  # of a wider order
        self._tensors["k"] = self._tensors["k"].new_zeros(panels.count)
        self._panels, self.width = panels, width
        self._versions = {moved[row]: seen for row, seen in self._versions.items() if row in moved}
        self._dead = {moved[row] for row in self._dead if row in moved}
        self._programs = self._programs.anew(self._panels)
        self._validation = self._validated()
        return moved

    def disturbed(self, row: int) -> str | None:
        known = self._member(row)
        if _versions(known.built.model) != self._versions[row]:
            return "the weights or buffers of its model"
        was, now = dict(known.signature), dict(job_signature(known.built))
        return next((repr(label) for label in (*was, *now) if was.get(label) != now.get(label)), None)

    def abandon(self) -> None:
        self._hypers.restart()

    def timing(self) -> tuple[float, float]:
        # Of whole batches, not of a short last one.
        launch_s = self._took_s[max(self._took_s)] if self._took_s else 0.0
        return launch_s, self._programs.prepare_s("train")

    # The rest

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Tensor:
        """The members' predictions for the same inputs: [rows, batch, ...]; of all that are there, or of these rows."""
        if rows is None:
            rows = [row for row, member in enumerate(self._known) if member is not None]
        chosen = torch.tensor(list(rows), device=self._device)
        leaves = self._layout.views(self._tensors["weights"].index_select(0, chosen))
        for name, tensor in self._tensors.items():
            kind, _, leaf = name.partition(":")
            if kind in ("fixed", "buffer"):
                leaves[leaf] = tensor.index_select(0, chosen)
        moved = inputs.to(self._device)
        once = {name: self._tensors[f"shared:{name}"] for name in self._recipe.shared}
        with torch.no_grad():
            return vmap(lambda own: functional_call(self._recipe.evaluating, {**own, **once}, (moved,)))(
                leaves
            )

    def peak_bytes(self) -> int | None:
        if self._peak_bytes is None and self._device.startswith("cuda"):
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
        return self._peak_bytes

    def close(self) -> None:
        self._leave_gathering()
        self._stream.close()
        if self._window is not None:
            self._window.close()
        self._programs = self._programs.anew(self._panels)
        self._raw.clear()  # whoever has the dictionary, a traceback say, holds no tensor by it
        self._best, self._validation = {}, None
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()


def make_window(known: Sequence[Known]) -> Window | None:
    """The window of a group whose data is streamed."""
    streams = [member.built.data for member in known if isinstance(member.built.data, Streamed)]
    return Window(streams) if streams else None


def _steps_by_epoch(known: Sequence[Known]) -> bool:
    """Whether a member's scheduler steps when an epoch has ended; those that step by batch are stepped ahead."""
    timers = [phase.timer for member in known for phase in member.built.phases]
    return any(timer is not None and not timer.by_step for timer in timers)


def _versions(model: nn.Module) -> list[int]:
    """Torch's own counts of writes into each tensor of a model."""
    return [tensor._version for tensor in (*model.parameters(), *model.buffers())]
