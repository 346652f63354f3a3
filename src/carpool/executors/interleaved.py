"""Groups beside one another: as many as fit are open, and whichever can go on and has had the least time goes on next.

One thread, no locks: a driver pauses after each chunk and wherever it would wait for its device or its input, so a job
that waits never stalls the others. On a GPU every session has a stream of its own and a few chunks in flight.

A fused group that cannot go on together (its check fails, or a launch fails for a reason no single row explains) goes
on job by job, from where the user's objects are; results of members that had already ended are kept.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from carpool import collector
from carpool.adapters.base import (
    Adapter,
    DeviceFull,
    FusedSession,
    JobState,
    Session,
    Trained,
    Unstackable,
)
from carpool.errors import FusionError, OutOfRoomError, described, failure, noted, sentence
from carpool.events import (
    Emit,
    GroupCompiled,
    GroupEnded,
    GroupFellBack,
    GroupStarted,
    JobAdmitted,
    JobEnded,
    JobFailed,
)
from carpool.executors.driver import Driver, Finish, Unfit
from carpool.executors.entry import Entry
from carpool.executors.interrupt import Pause
from carpool.executors.isolated import Isolated, Workers
from carpool.executors.isolated import wait as wait_for_workers
from carpool.executors.lane import Driving, Held, Lane, next_lane
from carpool.executors.member import Holding, Member
from carpool.job import Job
from carpool.memory import device as devices
from carpool.memory.ledger import Ledger
from carpool.memory.size import shown
from carpool.mistakes import explained
from carpool.planning.cursor import SLICE_S
from carpool.planning.plan import Plan
from carpool.planning.trials import Form
from carpool.result import Outcome, Result
from carpool.stopping import declared

MOST_OPEN = 64  # sessions at once; memory usually says less
_POLL_S, _LONG_POLL_S = (
    0.0002,
    0.005,
)  # how long to sleep when everything waits: a tenth of how long it has waited


@dataclass(frozen=True)
class Orders:
    """What the user asked of the run as a whole."""

    device: str
    strategy: str = "auto"
    verify: bool = False
    on_error: str = "collect"


class Run:
    """A plan being carried out; `results` fills up as jobs end, for whoever gave it."""

    def __init__(
        self,
        plan: Plan,
        jobs: Mapping[str, Job],
        adapters: Mapping[str, Adapter],
        orders: Orders,
        emit: Emit,
        results: dict[str, Result] | None = None,
    ) -> None:
        self._plan = plan
        self._jobs = jobs
        self._adapters = adapters
        self._orders = orders
        self._emit = emit
        self._ledger = Ledger(plan.free_bytes)
        self._waiting: deque[Entry] = deque()
        self._open: dict[Lane, Entry] = {}
        self._ran_s = time.perf_counter()
        """When one of them last went on."""
        self._workers = Workers(plan, jobs, adapters, orders.verify)
        self._most_open = 1 if orders.strategy == "in_turn" else MOST_OPEN
        self.results = {} if results is None else results

    def groups(self, pause: Pause) -> None:
        """Runs every group: those of higher priority are opened first, otherwise in the plan's order."""
        for name, error in self._plan.rejected.items():
            self._reject(name, error)
        entries = [
            Entry(number, group, group.names, group.strategy, group.reason)
            for number, group in enumerate(self._plan.groups)
        ]
        self._waiting = deque(sorted(entries, key=lambda entry: -self._priority(entry)))
        try:
            while self._waiting or self._open:
                self._admit()
                self._turn()
                pause.check()
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            self._workers.close()

    def _priority(self, entry: Entry) -> int:
        return max(self._jobs[name].priority for name in entry.names)

    def _weight(self, entry: Entry) -> float:
        """Every job has a share of its own, in a group too."""
        return sum(2.0 ** self._jobs[name].priority for name in entry.names)

    # Opening

    def _admit(self) -> None:
        """Opens what fits, in order. With nothing open, the first in line gets whatever there is."""
        while self._waiting and len(self._open) < self._most_open:
            entry = self._waiting[0]
            if self._open and (entry.alone or any(other.alone for other in self._open.values())):
                return
            running = sum(isinstance(lane.session, Isolated) for lane in self._open)
            if entry.strategy == "isolated" and not self._workers.has_room(running):
                return
            needed = entry.bytes + (self._workers.context_bytes if entry.strategy == "isolated" else 0)
            wanted = needed if self._open else min(needed, self._ledger.free_bytes)
            self._ledger, admitted = self._ledger.offer(entry.holder, wanted)
            if not admitted:
                return
            self._waiting.popleft()
            self._start(entry)

    def _start(self, entry: Entry) -> None:
        if not (entry.alone or entry.reason.startswith("fell back")):
            for name in entry.names:
                self._emit(JobAdmitted(name, entry.number, entry.group.memory.member_bytes))
            self._emit(GroupStarted(entry.number, entry.names, entry.strategy))
        try:
            driver, session = self._driven(entry)
        except BaseException as error:
            failure(error)
            self._ledger = self._ledger.release(entry.holder)
            if self._is_full(entry, error):
                self._shrink(entry, error, entry.saved)
            elif entry.strategy == "fused":
                self._fall_back(entry, error)
            else:
                for name in entry.names:
                    self._reject(name, error)
            return
        here = [lane for lane in self._open if not isinstance(lane.session, Isolated)]
        start_s = min((lane.used_s for lane in here), default=0.0)
        self._open[
            Lane(
                driver,
                session,
                self._orders.verify,
                self._orders.strategy == "auto" and not entry.alone,
                self._weight(entry),
                start_s,
            )
        ] = entry

    def _session(self, entry: Entry) -> Session:
        session = self._opened(entry)
        try:
            with session.turn():
                for row, name in enumerate(entry.names):
                    if name in entry.saved:
                        session.load(row, entry.saved[name][1])
        except BaseException:
            if isinstance(session, FusedSession):
                session.abandon()  # or optimizers and schedulers would stay where they were loaded
            session.close()
            raise
        return session

    def _opened(self, entry: Entry) -> Session:
        adapter = self._adapters[entry.group.adapter]
        jobs = [self._jobs[name] for name in entry.names]
        if entry.strategy != "fused":
            return adapter.open(
                jobs[0], self._orders.device, plain=entry.plain, exact=entry.strategy == "in_turn"
            )
        assert adapter.fuser is not None, "the planner fuses only what has a fuser"

        def prepared(size: int, width: int, form: Form, seconds: float) -> None:
            self._emit(GroupCompiled(entry.number, size, width, form, seconds))

        with collector.put_off():
            return adapter.fuser.open(jobs, len(jobs), self._orders.device, prepared)

    def _driven(self, entry: Entry) -> tuple[Driving, Held]:
        """What drives the entry, and what is closed when it has ended: for a worker one and the same."""
        if entry.strategy == "isolated":
            members, finish = self._members(entry, lambda: apart.peak_bytes())
            apart = self._workers.open(entry.group, members, finish, self._emit, entry.number)
            return apart, apart
        session = self._session(entry)
        members, finish = self._members(entry, session.peak_bytes, lambda: session.note)
        return Driver(session, members, finish, self._emit, entry.number), session

    def _members(
        self, entry: Entry, peak_bytes: Callable[[], int | None], note: Callable[[], str] = str
    ) -> tuple[list[Member], Finish]:
        courses = {spec.name: spec.course for spec in entry.group.specs}
        adapter = self._adapters[entry.group.adapter]
        started = time.perf_counter()

        def finish(
            member: Member, outcome: Outcome, state: JobState | None, error: BaseException | None = None
        ) -> None:
            try:
                trained = (
                    adapter.absorb(member.job, state) if state is not None else adapter.trained(member.job)
                )
            except BaseException as raised:  # half of it may be written: nobody starts again from that
                failure(raised)
                trained, outcome, error = adapter.trained(member.job), Outcome.FAILED, raised
                member.held = Holding(None, {})
            seconds = time.perf_counter() - started
            ended = _result(member, outcome, trained, error, seconds, peak_bytes(), entry)
            said = note()
            self._ended(replace(ended, reason=f"{ended.reason}; {said}") if said else ended)

        members = [
            entry.saved[name][0] if name in entry.saved else Member(self._jobs[name], courses[name])
            for name in entry.names
        ]
        return members, finish

    # Running

    def _turn(self) -> None:
        """One lane goes on, or all of them wait for a moment."""
        lanes = list(self._open)
        lane = next_lane(lanes)
        if lane is None:
            apart = [lane.session for lane in lanes if isinstance(lane.session, Isolated)]
            if lanes and len(apart) == len(lanes):
                wait_for_workers(apart)
            elif lanes:
                waited_s = time.perf_counter() - self._ran_s
                time.sleep(min(_LONG_POLL_S, max(_POLL_S, waited_s / 10)))
            return
        lane.driver.slice_s = SLICE_S if len(lanes) > 1 else None
        entry = self._open[lane]
        try:
            is_through = not lane.advance()
            self._ran_s = time.perf_counter()
            if is_through:
                self._close(lane)
        except BaseException as error:
            failure(error)
            if self._is_full(entry, error):
                self._recover(lane, entry, error)
                return
            if isinstance(lane.session, FusedSession):
                with lane.session.turn():
                    lane.session.abandon()
                self._close(lane)
                self._fall_back(entry, error)
                return
            if self._orders.on_error == "raise":
                raise
            self._close(lane)
            for name in entry.names:
                if name not in self.results:
                    self._reject(name, error)

    def _close(self, lane: Lane) -> None:
        entry = self._open.pop(lane)
        self._emit(GroupEnded(entry.number, entry.names, lane.seconds, lane.busy_s))
        lane.abandon()
        try:
            lane.session.close()
        except BaseException as error:  # its jobs have their outcomes, and the others go on
            failure(error)
            warnings.warn(f"carpool: closing {entry.names[0]!r} raised {described(error)}", stacklevel=2)
        self._ledger = self._ledger.release(entry.holder)

    # When the device is full

    def _is_full(self, entry: Entry, error: BaseException) -> bool:
        """Whether the device is: of a worker's we hear only what became of its jobs, it goes on by itself."""
        return entry.strategy != "isolated" and self._adapters[entry.group.adapter].is_full(error)

    def _recover(self, lane: Lane, entry: Entry, error: BaseException) -> None:
        """Closes what did not fit; its members go on from their last whole step where they can, else from their beginning."""
        _drop_frames(error)
        members = {member.name: member for member in lane.driver.unfinished}
        saved = self._salvaged(lane) if isinstance(error, DeviceFull) and error.tickets else {}
        fused = isinstance(lane.session, FusedSession)
        if isinstance(lane.session, FusedSession):
            with lane.session.turn():
                lane.session.abandon()
        self._close(lane)
        for name in self._left(entry):
            if not fused and name not in saved:  # it trained in place, and may hold half a step
                self._give_up(entry, name, error, members.get(name))
        self._shrink(replace(entry, plain=entry.plain or fused), error, saved)

    def _salvaged(self, lane: Lane) -> dict[str, tuple[Member, JobState]]:
        try:
            with lane.session.turn():
                return lane.driver.salvage()
        except BaseException as error:  # not even its states fit
            failure(error)
            return {}

    def _left(self, entry: Entry) -> tuple[str, ...]:
        return tuple(name for name in entry.names if name not in self.results)

    def _shrink(
        self, entry: Entry, error: BaseException, saved: Mapping[str, tuple[Member, JobState]]
    ) -> None:
        """Queues the members again: a group in halves, a job alone with the device. One that was alone already does not fit."""
        self._adapters[entry.group.adapter].free()
        names = self._left(entry)
        if len(names) == len(entry.names) == 1 and entry.alone:
            self._give_up(entry, names[0], error, saved[names[0]][0] if names[0] in saved else None)
            return
        parts = entry.parts(names, saved, described(error))
        if parts:
            self._emit(GroupFellBack(entry.number, names, parts[0].reason))
        self._waiting.extendleft(reversed(parts))

    def _give_up(self, entry: Entry, name: str, error: BaseException, member: Member | None) -> None:
        available = min(devices.read(self._orders.device).free_bytes, self._ledger.capacity_bytes)
        told = sentence(
            f"room for about {shown(entry.bytes)} on {self._orders.device}",
            f"{described(error)}, with {shown(available)} available",
            "take smaller batches, a smaller model or a larger device",
        )
        adapter, job = self._adapters[entry.group.adapter], self._jobs[name]
        reached = member or Member(job, next(spec.course for spec in entry.group.specs if spec.name == name))
        reached.held = Holding(None, {})  # it may hold half a step, or be as it came
        failure = OutOfRoomError(f"Job {name!r}: {told}")
        self._ended(_result(reached, Outcome.OUT_OF_MEMORY, adapter.trained(job), failure, 0.0, None, entry))

    def _fall_back(self, entry: Entry, error: BaseException) -> None:
        names = tuple(name for name in entry.names if name not in self.results)
        if self._orders.on_error == "raise" and any(r.error is error for r in self.results.values()):
            raise error
        reason = str(error) if isinstance(error, Unfit | Unstackable) else described(error)
        if self._orders.strategy == "fused":
            raise FusionError(f"The fused group of {entry.names[0]!r} cannot go on: {reason}") from error
        self._emit(GroupFellBack(entry.number, names, reason))
        why = f"fell back from {entry.strategy}: {reason}" if entry.strategy == "fused" else entry.reason
        for name in reversed(names):
            alone = Entry(entry.number, entry.group, (name,), "interleaved", why, plain=True)
            self._waiting.appendleft(alone)

    def _stop(self, error: BaseException) -> None:
        """Everything that is open ends where it stands, and is closed, whatever one of them raises."""
        for lane in self._open:
            if isinstance(error, KeyboardInterrupt) and isinstance(lane.session, Isolated):
                lane.session.ask()  # all of them at once: each takes as long as its step
        if isinstance(error, KeyboardInterrupt):
            self._keep_saved()
        for lane in list(self._open):
            try:
                if isinstance(error, KeyboardInterrupt):
                    lane.interrupt()
                elif isinstance(lane.session, FusedSession):
                    lane.session.abandon()
            except BaseException as raised:
                failure(raised)
                warnings.warn(
                    f"carpool: ending {self._open[lane].names[0]!r} raised {described(raised)}", stacklevel=2
                )
            finally:
                self._close(lane)

    def _keep_saved(self) -> None:
        """Those that wait to go on end with what they had reached."""
        for entry in self._waiting:
            adapter = self._adapters[entry.group.adapter]
            for member, state in entry.saved.values():
                trained = adapter.absorb(member.job, state)
                self._ended(_result(member, Outcome.INTERRUPTED, trained, None, 0.0, None, entry))

    # Ends

    def _reject(self, name: str, error: BaseException) -> None:
        error = explained(self._jobs[name], error)
        self._emit(JobFailed(name, error))
        self.results[name] = Result(name, Outcome.FAILED, dict(self._jobs[name].config or {}), error=error)
        self._emit(JobEnded(name, Outcome.FAILED, 0))
        self._raise_if_asked(error, name)

    def _ended(self, result: Result) -> None:
        if result.error is not None:
            result = replace(result, error=explained(self._jobs[result.name], result.error))
        self.results[result.name] = result
        if result.error is not None:
            self._emit(JobFailed(result.name, result.error))
        self._emit(
            JobEnded(result.name, result.outcome, result.steps, result.held if result.is_restored else None)
        )
        if result.error is not None:
            self._raise_if_asked(result.error, result.name)

    def _raise_if_asked(self, error: BaseException, name: str) -> None:
        if self._orders.on_error == "raise":
            raise noted(error, name)


def _drop_frames(error: BaseException) -> None:
    """Frees what the frames of an error, and of those behind it, hold: the tensors of the step that failed."""
    behind: BaseException | None = error
    while behind is not None:
        traceback.clear_frames(behind.__traceback__)
        behind = behind.__cause__ or behind.__context__


def _result(
    member: Member,
    outcome: Outcome,
    trained: Trained,
    error: BaseException | None,
    seconds: float,
    peak_bytes: int | None,
    entry: Entry,
) -> Result:
    epoch, metrics = member.holding
    return Result(
        name=member.name,
        outcome=outcome,
        epoch=epoch,
        held=metrics,
        modes=declared((member.job.stop, *member.job.callbacks)),
        config=dict(member.job.config or {}),
        history={metric: tuple(values) for metric, values in member.history.items()},
        model=trained.model,
        optimizer=trained.optimizer,
        scheduler=trained.scheduler,
        value=trained.value,
        error=error,
        steps=member.steps,
        seconds=seconds,
        peak_bytes=peak_bytes,
        strategy=entry.strategy,
        reason=entry.reason,
    )
