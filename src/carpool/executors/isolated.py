"""Groups in processes of their own: our side, which takes its turn like any other lane, and the worker's.

Inside a worker runs what runs everywhere: the plan of its jobs, the driver, the sessions. What happens there comes here as the same
typed events, and what a job reached as its outcome, history and state, which our adapter writes into the user's own objects.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

from carpool.adapters.base import Adapter, JobState
from carpool.errors import JobError, WorkerError, described
from carpool.events import (
    BatchesRead,
    Emit,
    EpochEnded,
    GroupAdvanced,
    GroupCompiled,
    GroupFellBack,
    GroupResized,
    GroupTried,
    GroupVerified,
    JobEnded,
)
from carpool.executors.driver import Finish, Member, Ready
from carpool.executors.interrupt import Pause
from carpool.job import Job
from carpool.memory.size import Limit
from carpool.planning.plan import Group, Plan
from carpool.process import worker as inside
from carpool.process.cores import cores, threads
from carpool.process.messages import Call, Message, News, Raised, Returned
from carpool.process.supervisor import Supervisor
from carpool.process.wire import Blocks, Closed
from carpool.result import Outcome, Result

_WAIT_S = 0.1  # how long to wait for workers to say something before looking at timeouts and Ctrl-C
_BEGIN_S = 120.0  # what importing and building may take, however short the timeout
_ANSWER_S = 10.0  # how long an interrupted worker may take to hand over what it had reached
_GROUP_EVENTS = GroupCompiled | GroupVerified | GroupTried | GroupFellBack | GroupResized | GroupAdvanced


@dataclass(frozen=True)
class Request:
    """What a worker is asked to train, and how."""

    jobs: tuple[Job, ...]
    device: str
    strategy: str
    verify: bool
    compile: str | bool
    most: Limit


@dataclass(frozen=True)
class Reached:
    """What a worker says of a job that has ended there."""

    name: str
    outcome: Outcome
    history: Mapping[str, Sequence[float]]
    steps: int
    state: JobState | None
    error: BaseException | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Began:
    """A worker has imported and built what its jobs need: from here on it is expected to make progress."""


# The worker's side


def carry_out(request: Request) -> None:
    """Trains the jobs of a request, in a worker, and tells what happens."""
    from carpool.train import Orders, Run, _prepare  # it imports this module

    with _prepare(request.jobs, request.device, request.strategy, request.compile, request.most) as prepared:
        orders = Orders(prepared.plan.device, request.strategy, request.verify)
        adapter = next(iter(prepared.adapters.values()))

        def emit(event: object) -> None:
            if isinstance(event, JobEnded):
                _tell(_reached(run.results[event.name], prepared.jobs[event.name], adapter))
            elif isinstance(event, _GROUP_EVENTS | EpochEnded | BatchesRead):
                inside.tell(event)

        inside.tell(Began())
        run = Run(prepared.plan, prepared.jobs, prepared.adapters, orders, emit)
        with Pause() as pause:
            try:
                run.groups(pause)
            except KeyboardInterrupt:
                return  # what every job had reached has been told


def _reached(result: Result, job: Job, adapter: Adapter) -> Reached:
    state = None if result.model is None else adapter.left(job)
    error = None if result.error is None else inside.portable(result.error)
    return Reached(result.name, result.outcome, result.history, result.steps, state, error, result.peak_bytes)


def _tell(reached: Reached) -> None:
    try:
        inside.tell(reached)
    except Closed:
        raise
    except Exception as error:
        why = WorkerError(f"What {reached.name!r} left cannot be handed over: {described(error)}")
        inside.tell(replace(reached, outcome=Outcome.FAILED, state=None, error=why))


# Our side


class Workers:
    """The workers of one run: what they are asked, with which environment, and how many there may be at once."""

    def __init__(
        self, plan: Plan, jobs: Mapping[str, Job], adapters: Mapping[str, Adapter], verify: bool
    ) -> None:
        """Raises JobError for what cannot be pickled."""
        self._jobs, self._adapters, self._verify = jobs, adapters, verify
        self._device, self._most = plan.device, Limit(size_bytes=plan.free_bytes)
        self._on_cpu = not plan.device.startswith("cuda")
        self._blocks = Blocks()
        groups = [group for group in plan.groups if group.strategy == "isolated"]
        self._at_once = min(len(groups), cores())
        for group in groups:
            self._survey(self._request(group))
        self._blocks.surveyed()

    def _survey(self, request: Request) -> None:
        try:
            self._blocks.survey(request)
        except Exception:
            for job in request.jobs:
                refuse_unpicklable(job)
            raise

    def has_room(self, running: int) -> bool:
        """Whether one more may be started: on a CPU one for each core, on a GPU as the memory allows."""
        return not self._on_cpu or running < self._at_once

    def open(
        self, group: Group, members: Sequence[Member], finish: Finish, emit: Emit, number: int
    ) -> Isolated:
        """Starts a worker for the group. It is at work when this returns."""
        request = self._request(group)
        jobs = [self._jobs[name] for name in group.names]
        limits = [job.timeout_s for job in jobs if job.timeout_s is not None]
        timeout_s = min(limits, default=None)
        at_first_s = None if timeout_s is None else max(timeout_s, _BEGIN_S)
        worker = Supervisor(self._environment(jobs), at_first_s)
        try:
            worker.call(Call(carry_out, (request,)), self._blocks)
        except BaseException:
            worker.stop()
            raise
        return Isolated(worker, members, finish, emit, number, timeout_s)

    def _request(self, group: Group) -> Request:
        plain = [replace(self._jobs[name], share=None, timeout_s=None) for name in group.names]
        alone = "in_turn" if self._on_cpu else "interleaved"
        strategy = alone if len(plain) == 1 else "auto"
        compile = self._adapters[group.adapter].compile
        return Request(tuple(plain), self._device, strategy, self._verify, compile, self._most)

    def _environment(self, jobs: Sequence[Job]) -> dict[str, str]:
        env = threads(self._at_once, cores(), os.environ) if self._on_cpu else {}
        shares = [job.share for job in jobs if job.share is not None]
        if shares:
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{math.ceil(100 * min(1.0, sum(shares)))}"
        return env

    def close(self) -> None:
        self._blocks.close()


def refuse_unpicklable(job: Job) -> None:
    """Raises JobError for the first field of the job that cannot be sent to a worker."""
    for field in fields(job):
        try:
            Blocks().survey(getattr(job, field.name))
        except Exception as error:
            expected = f"a {field.name} that can be pickled, to be sent to a worker"
            raise JobError(
                job._says(expected, described(error), "pass what a worker can open by itself: a function")
            ) from error


def is_picklable(job: Job) -> bool:
    """Whether the job could be sent to a worker."""
    try:
        Blocks().survey(job)
    except Exception:
        return False
    return True


def wait(open_: Sequence[Isolated]) -> None:
    """Sleeps until one of these workers has something to say, or for a moment: asking all the time would cost a part of a core."""
    select.select([one.worker for one in open_], [], [], _WAIT_S)


class Isolated:
    """A group in a worker: a driver, because it is advanced, and a session, because it is closed."""

    def __init__(
        self,
        worker: Supervisor,
        members: Sequence[Member],
        finish: Finish,
        emit: Emit,
        group: int,
        timeout_s: float | None = None,
    ) -> None:
        self.worker, self._timeout_s = worker, timeout_s
        self.slice_s: float | None = None
        self._members = {member.name: member for member in members}
        self._finish, self._emit, self._group = finish, emit, group
        self._next: Message | WorkerError | None = None
        self._peak_bytes: int | None = None

    def run(self, verify: bool = False, measure: bool = False) -> Iterator[Ready]:
        """Takes what the worker says until every member has an outcome."""
        while self._members:
            yield self._has_news
            self._heed(self._next)
            self._next = None

    def _has_news(self) -> bool:
        if self._next is None:
            try:
                self._next = self.worker.poll()
            except WorkerError as error:
                self._next = error
        return self._next is not None

    def _heed(self, said: Message | WorkerError | None) -> None:
        match said:
            case News(Reached() as reached):
                self._end(reached)
            case News(EpochEnded() as event):
                for metric, value in event.metrics.items():
                    self._members[event.name].history.setdefault(metric, []).append(value)
                self._emit(event)
            case News(Began()):
                self.worker.timeout_s = self._timeout_s
            case News(BatchesRead() as event):
                self._emit(event)
            case News(event):
                self._emit(replace(event, group=self._group))
            case Raised(error):
                self._fail(error)
            case WorkerError():
                self._fail(said)
            case Returned():
                self._fail(WorkerError("A worker process ended without a word about this job."))

    def _end(self, reached: Reached) -> None:
        member = self._members.pop(reached.name)
        member.history = {metric: list(values) for metric, values in reached.history.items()}
        member.steps = reached.steps
        self._peak_bytes = reached.peak_bytes
        self._finish(member, reached.outcome, reached.state, reached.error)

    def _fail(self, error: BaseException) -> None:
        """Those that have not ended fail, with what the worker had told of them; their objects are as they were."""
        while self._members:
            _, member = self._members.popitem()
            self._finish(member, Outcome.FAILED, None, error)

    def ask(self) -> None:
        """Asks the worker to stop where it stands."""
        self.worker.interrupt()

    def interrupt(self) -> None:
        """Members end with what they had reached, where the worker still answers."""
        self.ask()
        end = time.monotonic() + _ANSWER_S
        try:
            while self._members and time.monotonic() < end:
                said = self._next or self.worker.wait(end - time.monotonic())
                self._next = None
                if not isinstance(said, News):
                    break
                self._heed(said)
        except WorkerError:
            pass  # it died meanwhile: there is nothing to hand over
        while self._members:
            _, member = self._members.popitem()
            self._finish(member, Outcome.INTERRUPTED, None)

    def salvage(self) -> dict[str, tuple[Member, JobState]]:
        """Nothing: a worker whose device is full goes on by itself."""
        return {}

    def turn(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def busy_s(self) -> float | None:
        return None

    def peak_bytes(self) -> int | None:
        return self._peak_bytes

    def close(self) -> None:
        self.worker.stop()
