"""Groups in processes of their own: our side, which takes its turn like any other lane. The worker's is `errand.py`.

What happens in a worker comes here as the same
typed events, and what a job reached as its outcome, history and state, which our adapter writes into the user's own objects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields, replace
from typing import Any

from carpool.adapters.base import Adapter, JobState
from carpool.environment import cores
from carpool.errors import JobError, OutOfRoomError, WorkerError, described, failure, sentence
from carpool.events import BatchesRead, Emit, EpochEnded
from carpool.executors.driver import Finish, Ready
from carpool.executors.errand import Began, Reached, Request, carry_out
from carpool.executors.member import Holding, Member
from carpool.job import Job, share_of
from carpool.memory import device as devices
from carpool.memory.policy import CONTEXT_BYTES, Policy, variables
from carpool.memory.size import Limit, shown, size
from carpool.planning.plan import Group, Plan
from carpool.process.messages import Call, Message, News, Raised, Returned
from carpool.process.mps import service, thread_share
from carpool.process.ready import ready
from carpool.process.supervisor import Supervisor
from carpool.process.threads import threads
from carpool.process.wire import Blocks
from carpool.result import Outcome

_WAIT_S = 0.1  # how long to wait for workers to say something before looking at timeouts and Ctrl-C
_BEGIN_S = 120.0  # what importing and building may take, however short the timeout
_NOTHING = Holding(None, {})  # of what the worker trained: the job's objects are as they came
_ANSWER_S = 10.0  # how long an interrupted worker may take to hand over what it had reached


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
        self._shared = ExitStack()
        for group in groups:
            self._survey(self._request(group))
        self._blocks.surveyed()
        self._mps = self._shared.enter_context(service()).variables if groups and not self._on_cpu else {}

    def _survey(self, request: Request) -> None:
        try:
            self._blocks.survey(request)
        except BaseException as error:
            failure(error)
            for job in request.jobs:
                refuse_unpicklable(job)
            raise

    @property
    def context_bytes(self) -> int:
        """What a worker takes on the device beside what its jobs take."""
        return 0 if self._on_cpu else CONTEXT_BYTES

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
        special = self._adapters[group.adapter].environment(jobs)
        worker = Supervisor({**self._environment(jobs), **special}, at_first_s)
        try:
            worker.call(Call(carry_out, (request,)), self._blocks)
        except BaseException:
            worker.stop()
            raise
        cap_bytes = (
            _cap_bytes(jobs) if self._on_cpu else None
        )  # on a GPU the framework in the worker keeps it
        return Isolated(worker, members, finish, emit, number, timeout_s, cap_bytes)

    def _request(self, group: Group) -> Request:
        plain = [replace(self._jobs[name], share=None, timeout_s=None) for name in group.names]
        alone = "in_turn" if self._on_cpu else "interleaved"
        strategy = alone if len(plain) == 1 else "auto"
        compile = self._adapters[group.adapter].compile
        device = self._device if self._on_cpu else "cuda:0"  # the one that the worker sees
        return Request(tuple(plain), device, strategy, self._verify, compile, self._most)

    def _environment(self, jobs: Sequence[Job]) -> dict[str, str]:
        wanted = share_of(jobs)
        share = thread_share(wanted) if wanted is not None else {}
        if self._on_cpu:
            return threads(self._at_once, cores(), os.environ) | share
        policy = Policy(Limit(size_bytes=_cap_bytes(jobs)))
        taken = variables(policy, devices.read(self._device).total_bytes, os.environ)
        index = int(self._device.partition(":")[2] or 0)
        name = devices.visible_name(index, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        return {**taken, **self._mps, **share, "CUDA_VISIBLE_DEVICES": name}

    def close(self) -> None:
        self._blocks.close()
        self._shared.close()


def _cap_bytes(jobs: Sequence[Job]) -> int | None:
    """What the jobs of a worker may take together; None unless each of them says."""
    budgets = [size(job.budget) for job in jobs if job.budget is not None]
    return sum(budgets) if len(budgets) == len(jobs) else None


def refuse_unpicklable(job: Job) -> None:
    """Raises JobError for the first field of the job that cannot be sent to a worker."""
    for field in fields(job):
        try:
            Blocks().survey(getattr(job, field.name))
        except BaseException as error:
            failure(error)
            expected = f"a {field.name} that can be pickled, to be sent to a worker"
            raise JobError(
                job._says(expected, described(error), "pass what a worker can open by itself: a function")
            ) from error


def is_picklable(job: Job) -> bool:
    """Whether the job could be sent to a worker."""
    try:
        Blocks().survey(job)
    except BaseException as error:
        failure(error)
        return False
    return True


def wait(open_: Sequence[Isolated]) -> None:
    """Sleeps until one of these workers has something to say, or for a moment: asking all the time would cost a part of a core."""
    ready([one.worker for one in open_], _WAIT_S)


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
        cap_bytes: int | None = None,
    ) -> None:
        self.worker, self._timeout_s = worker, timeout_s
        self._cap_bytes, self._first_bytes = cap_bytes, 0
        self.slice_s: float | None = None
        self._members = {member.name: member for member in members}
        self._finish, self._emit, self._group = finish, emit, group
        self._next: Message | WorkerError | OutOfRoomError | None = None
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
                self._check_cap()
            except (WorkerError, OutOfRoomError) as error:
                self._next = error
        return self._next is not None

    def _check_cap(self) -> None:
        """Ends a worker that holds more for its jobs than they may take."""
        held = self.worker.beat.rss_bytes if self.worker.beat is not None else None
        if self._cap_bytes is None or held is None or not self._first_bytes:
            return
        if (taken := held - self._first_bytes) > self._cap_bytes:
            self.worker.kill()
            names = ", ".join(map(repr, self._members))
            told = sentence(
                f"{names} to take at most their budget of {shown(self._cap_bytes)}",
                f"{shown(taken)} in their worker, which was stopped",
                "raise budget=, or take smaller batches",
            )
            raise OutOfRoomError(told)

    def _heed(self, said: Message | WorkerError | OutOfRoomError | None) -> None:
        match said:
            case News(Reached() as reached):
                self._end(reached)
            case News(EpochEnded() as event):
                for metric, value in event.metrics.items():
                    self._members[event.name].history.setdefault(metric, []).append(value)
                self._emit(event)
            case News(Began(rss_bytes)):
                self.worker.timeout_s, self._first_bytes = self._timeout_s, rss_bytes or 0
            case News(BatchesRead() as event):
                self._emit(event)
            case News(event):
                self._emit(replace(event, group=self._group))
            case Raised(error):
                self._fail(error)
            case WorkerError():
                self._fail(said)
            case OutOfRoomError():
                self._fail(said, Outcome.OUT_OF_MEMORY)
            case Returned():
                self._fail(WorkerError("A worker process ended without a word about this job."))

    def _end(self, reached: Reached) -> None:
        member = self._members.pop(reached.name)
        member.history = {metric: list(values) for metric, values in reached.history.items()}
        member.steps, member.held = reached.steps, reached.held
        self._peak_bytes = reached.peak_bytes
        self._finish(member, reached.outcome, reached.state, reached.error)

    def _fail(self, error: BaseException, outcome: Outcome = Outcome.FAILED) -> None:
        """Those that have not ended fail, with what the worker had told of them; their objects are as they were."""
        while self._members:
            _, member = self._members.popitem()
            member.held = _NOTHING
            self._finish(member, outcome, None, error)

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
            member.held = _NOTHING
            self._finish(member, Outcome.INTERRUPTED, None)

    @property
    def unfinished(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

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
