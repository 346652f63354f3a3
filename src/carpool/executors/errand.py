"""What a worker is asked to train, and what it tells: inside it runs what runs everywhere, the plan, the driver, the sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from carpool.adapters.base import Adapter, JobState
from carpool.errors import WorkerError, described, failure
from carpool.events import (
    BatchesRead,
    EpochEnded,
    GroupAdvanced,
    GroupCompiled,
    GroupFellBack,
    GroupResized,
    GroupTried,
    GroupVerified,
    JobEnded,
)
from carpool.executors.interrupt import Pause
from carpool.executors.member import Holding
from carpool.job import Job
from carpool.memory.size import Limit
from carpool.process import worker as inside
from carpool.process.wire import Closed
from carpool.result import Outcome, Result

GROUP_EVENTS = GroupCompiled | GroupVerified | GroupTried | GroupFellBack | GroupResized | GroupAdvanced


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
    held: Holding


@dataclass(frozen=True)
class Began:
    """A worker has imported and built what its jobs need: from here on it is expected to make progress.

    `rss_bytes` is what it holds by then, before the jobs.
    """

    rss_bytes: int | None


def carry_out(request: Request) -> None:
    """Trains the jobs of a request, in a worker, and tells what happens."""
    with contextlib.suppress(KeyboardInterrupt), Pause() as pause:  # what every job had reached has been told
        _carry_out(request, pause)


def _carry_out(request: Request, pause: Pause) -> None:
    from carpool.train import Orders, Run, _prepare  # it imports this module

    by_name = {str(job.name): job for job in request.jobs}
    with _prepare(
        by_name, request.device, request.strategy, request.compile, request.most, (), pause
    ) as prepared:
        orders = Orders(prepared.plan.device, request.strategy, request.verify)
        adapter = next(iter(prepared.adapters.values()))

        def emit(event: object) -> None:
            if isinstance(event, JobEnded):
                _tell(_reached(run.results[event.name], prepared.jobs[event.name], adapter))
            elif isinstance(event, GROUP_EVENTS | EpochEnded | BatchesRead):
                inside.tell(event)

        inside.tell(Began(inside.rss_bytes()))
        run = Run(prepared.plan, prepared.jobs, prepared.adapters, orders, emit, {})
        run.groups(pause)


def _reached(result: Result, job: Job, adapter: Adapter) -> Reached:
    state = None if result.model is None else adapter.left(job)
    error = None if result.error is None else inside.portable(result.error)
    held = Holding(result.epoch, {name: result.metric(name) for name in result.history})
    return Reached(
        result.name, result.outcome, result.history, result.steps, state, error, result.peak_bytes, held
    )


def _tell(reached: Reached) -> None:
    try:
        inside.tell(reached)
    except Closed:
        raise
    except BaseException as error:
        failure(error)
        why = WorkerError(f"What {reached.name!r} left cannot be handed over: {described(error)}")
        inside.tell(replace(reached, outcome=Outcome.FAILED, state=None, error=why))
