"""How a run stands: a fold over its events, without a clock or a terminal.

Epochs may end thousands of times a second, so taking an event costs a few dictionary look-ups; whatever needs
sorting (the leaderboard) is worked out when it is asked for.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from carpool.errors import described
from carpool.events import (
    EpochEnded,
    EpochsEnded,
    Event,
    GroupAdvanced,
    GroupCompiled,
    GroupFellBack,
    GroupResized,
    GroupStarted,
    GroupVerified,
    JobAdmitted,
    JobEnded,
    JobFailed,
    RunEnded,
    RunStarted,
)
from carpool.fidelity import Proof
from carpool.planning.plan import Group, Plan
from carpool.result import UNSOUND, Outcome
from carpool.stopping import direction, is_known


class State(enum.Enum):
    """Where a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class JobTally:
    """One job: its state, the epochs it has ended and its last metrics; `word` is what to show as its state."""

    name: str
    group: int | None
    epochs: int = 0
    planned_steps: int = 0
    state: State = State.WAITING
    word: str = State.WAITING.value
    ended_epochs: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class GroupTally:
    """One group: its steps over all members, and what was last said about it."""

    number: int
    strategy: str
    jobs: int
    total_steps: int
    done_steps: int = 0
    left: int = 0
    started: bool = False
    checks: int = 0
    max_difference: float = 0.0
    note: str = ""

    @property
    def ended(self) -> bool:
        return self.left <= 0

    @property
    def fraction(self) -> float:
        """How much of the group is done, between 0 and 1."""
        return 1.0 if self.ended else min(1.0, self.done_steps / max(1, self.total_steps))


class Tally:
    """Everything the displays show, kept up to date by `take`."""

    def __init__(self) -> None:
        self.device = ""
        self.jobs: dict[str, JobTally] = {}
        self.groups: dict[int, GroupTally] = {}
        self.counts = dict.fromkeys(State, 0)
        self.outcomes: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.steps = 0
        self.total_steps = 0
        self.compile_s = 0.0
        self.metric: str | None = None
        self.seconds: float | None = None
        self._together: dict[tuple[str, ...], EpochsEnded] = {}

    def take(self, event: Event) -> None:
        """Counts one event."""
        match event:
            case EpochEnded(name, epoch, metrics):
                self._end_epoch(self._job(name), epoch, metrics)
            case EpochsEnded(names):
                self._together[names] = event
            case GroupAdvanced(group, steps):
                self.steps += steps
                self._group(group).done_steps += steps
            case JobAdmitted(name):
                self._move(self._job(name), State.RUNNING)
            case JobFailed(name, error):
                self.errors.setdefault(name, described(error))
                self._move(self._job(name), State.FAILED)
            case JobEnded(name, outcome, steps, held):
                self._end_job(self._job(name), outcome, steps, held)
            case RunStarted(plan, device, steps):
                self._start(plan, device, steps)
            case RunEnded(seconds):
                self.seconds = seconds
            case _:
                self._take_group_event(event)

    @property
    def fraction(self) -> float:
        """How much of the run is done, between 0 and 1."""
        return min(1.0, self.steps / max(1, self.total_steps))

    def best(self, most: int) -> list[JobTally]:
        """The best jobs by the main metric, best first; failed jobs and those without a value are never among them.

        Nobody is, where the metric's name does not say which way it is better.
        """
        metric = self.metric
        if metric is None or not is_known(metric):
            return []
        sign = -1.0 if direction(metric) == "max" else 1.0
        return heapq.nsmallest(most, self._measured(metric), key=lambda job: sign * job.metrics[metric])

    def leaders(self, most: int) -> list[JobTally]:
        """Whom to show where not all fit: the best, or the first in order where nothing ranks them."""
        if self.metric is None or is_known(self.metric):
            return self.best(most)
        return list(islice(self._measured(self.metric), most))

    def _measured(self, metric: str) -> Iterator[JobTally]:
        """Who has not failed and has a finite value."""
        sound = (job for job in self.jobs.values() if job.state is not State.FAILED)
        return (job for job in sound if math.isfinite(job.metrics.get(metric, math.nan)))

    def _start(self, plan: Plan, device: str, steps: int) -> None:
        self.device, self.total_steps = device, steps
        for number, group in enumerate(plan.groups):
            self._add_group(number, group)
        for name, error in plan.rejected.items():
            self.errors[name] = described(error)
            self._move(self._job(name), State.FAILED)

    def _add_group(self, number: int, group: Group) -> None:
        steps = sum(spec.course.steps for spec in group.specs)
        self.groups[number] = GroupTally(
            number, group.strategy, len(group.specs), steps, left=len(group.specs)
        )
        for spec in group.specs:
            self._add_job(JobTally(spec.name, number, spec.course.epochs, spec.course.steps))

    def _add_job(self, job: JobTally) -> JobTally:
        self.counts[job.state] += 1
        self.jobs[job.name] = job
        return job

    def settle(self) -> None:
        """Brings the jobs up to date whose epochs ended together: whoever shows them asks for it first."""
        together, self._together = self._together, {}
        for event in together.values():
            columns = zip(*(column.tolist() for column in event.metrics.values()), strict=True)
            for name, epoch, values in zip(event.names, event.epochs.tolist(), columns, strict=True):
                self._end_epoch(self._job(name), epoch, dict(zip(event.metrics, values, strict=True)))

    def _job(self, name: str) -> JobTally:
        if self._together:
            self.settle()
        return self.jobs.get(name) or self._add_job(JobTally(name, None))

    def _group(self, number: int) -> GroupTally:
        if number not in self.groups:
            self.groups[number] = GroupTally(number, "", 0, 0)
        return self.groups[number]

    def _end_epoch(self, job: JobTally, epoch: int, metrics: Mapping[str, float]) -> None:
        job.ended_epochs, job.metrics = epoch + 1, metrics
        if job.state is State.WAITING:
            self._move(job, State.RUNNING)
        if self.metric != "val_loss":
            self.metric = main_metric(metrics) or self.metric

    def _end_job(self, job: JobTally, outcome: Outcome, steps: int, held: Mapping[str, float] | None) -> None:
        self._move(job, State.FAILED if outcome in UNSOUND else State.DONE)
        job.metrics = job.metrics if held is None else held
        job.word = outcome.word
        self.outcomes[outcome.word] = self.outcomes.get(outcome.word, 0) + 1
        spared = max(0, job.planned_steps - steps)  # a job that ends early leaves steps that nobody will run
        self.total_steps -= spared
        if job.group is not None:
            group = self._group(job.group)
            group.total_steps -= spared
            group.left -= 1

    def _move(self, job: JobTally, state: State) -> None:
        self.counts[job.state] -= 1
        self.counts[state] += 1
        job.state, job.word = state, state.value

    def _take_group_event(self, event: Event) -> None:
        match event:
            case GroupStarted(group, _, strategy):
                entry = self._group(group)
                entry.started, entry.strategy, entry.note = True, strategy, "preparing"
            case GroupCompiled(group, _, _, form, seconds):
                self.compile_s += seconds
                self._group(group).note = f"{form} in {seconds:.1f} s"
            case GroupVerified(group):
                self._verify(self._group(group), event)
            case GroupFellBack(group, _, reason):
                self._group(group).note = f"one by one: {reason}"
            case GroupResized(group, _, new_width):
                self._group(group).note = f"repacked to {new_width}"
            case _:
                pass

    def _verify(self, group: GroupTally, event: GroupVerified) -> None:
        group.checks += 1
        if event.proof is Proof.TRACES:
            group.note = f"equal traces of {event.checked}"
            return
        group.max_difference = max(group.max_difference, event.max_difference)
        group.note = f"verified {event.checked} within {group.max_difference:.1e}"


def main_metric(metrics: Mapping[str, float]) -> str | None:
    """The metric that ranks jobs: `val_loss` where there is one, else `loss`, else the first.

    >>> main_metric({"loss": 0.1, "val_loss": 0.2}), main_metric({"reward": 1.0}), main_metric({})
    ('val_loss', 'reward', None)
    """
    return next((name for name in ("val_loss", "loss") if name in metrics), next(iter(metrics), None))
