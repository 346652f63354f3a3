"""Groups one after another: each opens its session, drives it to the end and closes it.

A fused group that cannot go on together (its check fails, or a launch fails for a reason no single row explains) goes
on in turn, from where the user's objects are; results of members that had already ended are kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from carpool.adapters.base import Adapter, FusedSession, JobState, Session, Trained
from carpool.errors import FusionError, described
from carpool.events import Emit, GroupCompiled, GroupFellBack, GroupStarted, JobAdmitted, JobEnded, JobFailed
from carpool.executors.driver import Driver, Member, Unfit
from carpool.executors.interrupt import Pause
from carpool.job import Job
from carpool.memory.ledger import Ledger
from carpool.planning.plan import Group, Plan
from carpool.result import Outcome, Result


@dataclass(frozen=True)
class Orders:
    """What the user asked of the run as a whole."""

    device: str
    strategy: str = "auto"
    verify: bool = False
    on_error: str = "collect"


class Run:
    """A plan being carried out; `results` fills up as jobs end."""

    def __init__(
        self, plan: Plan, jobs: Mapping[str, Job], adapters: Mapping[str, Adapter], orders: Orders, emit: Emit
    ) -> None:
        self._plan = plan
        self._jobs = jobs
        self._adapters = adapters
        self._orders = orders
        self._emit = emit
        self._ledger = Ledger(plan.free_bytes)
        self.results: dict[str, Result] = {}

    def groups(self, pause: Pause) -> None:
        """Runs every group, in the plan's order."""
        for name, error in self._plan.rejected.items():
            self._reject(name, error)
        for number, group in enumerate(self._plan.groups):
            self._group(number, group, pause)

    def _reject(self, name: str, error: BaseException) -> None:
        self._emit(JobFailed(name, error))
        self.results[name] = Result(name, Outcome.FAILED, dict(self._jobs[name].config or {}), error=error)
        self._emit(JobEnded(name, Outcome.FAILED, 0))
        self._raise_if_asked(error)

    def _group(self, number: int, group: Group, pause: Pause) -> None:
        holder = f"group {number}"
        self._ledger, _ = self._ledger.offer(holder, min(group.memory.total_bytes, self._ledger.free_bytes))
        for spec in group.specs:
            self._emit(JobAdmitted(spec.name, number, group.memory.member_bytes))
        self._emit(GroupStarted(number, group.names, group.strategy))
        try:
            if group.strategy == "fused":
                self._fused(number, group, pause)
            else:
                for spec in group.specs:
                    self._solo(number, group, spec.name, group.reason, pause)
        finally:
            self._ledger = self._ledger.release(holder)

    def _fused(self, number: int, group: Group, pause: Pause) -> None:
        fuser = self._adapters[group.adapter].fuser
        assert fuser is not None, "the planner fuses only what has a fuser"

        def prepared(size: int, width: int, compiled: bool, seconds: float) -> None:
            self._emit(GroupCompiled(number, size, width, compiled, seconds))

        jobs = [self._jobs[name] for name in group.names]
        try:
            session = fuser.open(jobs, len(jobs), self._orders.device, prepared)
            self._drive(number, group, session, group.names, group.strategy, group.reason, pause)
        except Exception as error:
            self._fall_back(number, group, error, pause)

    def _fall_back(self, number: int, group: Group, error: Exception, pause: Pause) -> None:
        names = tuple(name for name in group.names if name not in self.results)
        if self._orders.on_error == "raise" and any(r.error is error for r in self.results.values()):
            raise error
        reason = str(error) if isinstance(error, Unfit) else described(error)
        if self._orders.strategy == "fused":
            raise FusionError(f"The fused group of {group.names[0]!r} cannot go on: {reason}") from error
        self._emit(GroupFellBack(number, names, reason))
        for name in names:
            self._solo(number, group, name, f"fell back from fused: {reason}", pause)

    def _solo(self, number: int, group: Group, name: str, reason: str, pause: Pause) -> None:
        try:
            session = self._adapters[group.adapter].open(self._jobs[name], self._orders.device)
        except Exception as error:
            self._reject(name, error)
            return
        self._drive(number, group, session, (name,), "in_turn", reason, pause)

    def _drive(
        self,
        number: int,
        group: Group,
        session: Session,
        names: tuple[str, ...],
        strategy: str,
        reason: str,
        pause: Pause,
    ) -> None:
        courses = {spec.name: spec.course for spec in group.specs}
        started = time.perf_counter()

        def finish(
            member: Member, outcome: Outcome, state: JobState | None, error: BaseException | None = None
        ) -> None:
            adapter = self._adapters[group.adapter]
            trained = adapter.absorb(member.job, state) if state is not None else adapter.trained(member.job)
            seconds = time.perf_counter() - started
            result = _result(member, outcome, trained, error, seconds, session.peak_bytes(), strategy, reason)
            self._ended(result)

        driver = Driver(
            session, [Member(self._jobs[name], courses[name]) for name in names], finish, self._emit, number
        )
        try:
            for _ in driver.run(self._orders.verify):
                pause.check()
        except KeyboardInterrupt:
            driver.interrupt()
            raise
        except Exception:
            if isinstance(session, FusedSession):
                session.abandon()
            raise
        finally:
            session.close()

    def _ended(self, result: Result) -> None:
        self.results[result.name] = result
        if result.error is not None:
            self._emit(JobFailed(result.name, result.error))
        self._emit(JobEnded(result.name, result.outcome, result.steps))
        if result.error is not None:
            self._raise_if_asked(result.error)

    def _raise_if_asked(self, error: BaseException) -> None:
        if self._orders.on_error == "raise":
            raise error


def _result(
    member: Member,
    outcome: Outcome,
    trained: Trained,
    error: BaseException | None,
    seconds: float,
    peak_bytes: int | None,
    strategy: str,
    reason: str,
) -> Result:
    return Result(
        name=member.name,
        outcome=outcome,
        config=dict(member.job.config or {}),
        history={metric: tuple(values) for metric, values in member.history.items()},
        model=trained.model,
        optimizer=trained.optimizer,
        scheduler=trained.scheduler,
        error=error,
        steps=member.steps,
        seconds=seconds,
        peak_bytes=peak_bytes,
        strategy=strategy,
        reason=reason,
    )
