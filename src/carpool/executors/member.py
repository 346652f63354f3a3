"""A job on its way through a session."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

from carpool.adapters.base import MetricRow
from carpool.ambient import Ambient
from carpool.events import EpochEnded
from carpool.executors.cohort import Cohort
from carpool.job import Job
from carpool.planning.cursor import Course, Cursor
from carpool.stopping import Patience


class Holding(NamedTuple):
    """What a job's weights are: the epoch at whose end they were so, if they are of one's end, and their metrics."""

    epoch: int | None
    metrics: Mapping[str, float]


class Member:
    """A job on its way: where it stands and what it has shown so far."""

    def __init__(self, job: Job, course: Course) -> None:
        self.job = job
        self.name = str(job.name)
        self.decides = bool(job.stop or job.callbacks)
        """Whether something is decided at the end of each epoch, so that its metrics must be known at once."""
        self.validates = job.validation_data is not None
        self.cohort = Cohort((), course, Cursor(), self.decides, self.validates)
        self.patience = None if job.stop is None else Patience(job.stop)
        self.history: dict[str, list[float]] = {}
        self.epochs_ended = 0
        self.steps = 0
        self.steps_at_end = 0
        """The steps that it had taken when an epoch last ended."""
        self.restored: int | None = None
        """The epoch whose weights were put back."""
        self.held: Holding | None = None
        """What its weights are, where steps and epochs do not say it."""
        self._generators: Ambient | None = None
        self._epochs_of: dict[str, list[int]] = {}
        """The epochs of a metric that not every epoch has."""
        self.sums: dict[str, float] = {}
        self.samples = 0

    @property
    def course(self) -> Course:
        return self.cohort.course

    @property
    def cursor(self) -> Cursor:
        return self.cohort.cursor

    def call_back(self, event: EpochEnded) -> None:
        """Calls the job's callbacks; what they draw depends on the job's seed alone."""
        callbacks = [
            one for one in self.job.callbacks if callable(one)
        ]  # a framework's own its session calls
        if not callbacks:
            return
        self._generators = self._generators or Ambient(self.job.seed)
        with self._generators.inside():
            for callback in callbacks:
                callback(event)

    def stand(self, cursor: Cursor, epochs: int | None = None) -> None:
        """Leaves the others that moved with it; `epochs` where its course turns out to have so many."""
        course = self.course if epochs is None else self.course._replace(epochs=epochs)
        self.cohort = Cohort((), course, cursor, self.decides, self.validates)

    @property
    def movable(self) -> bool:
        """Whether its state is all there is: no best weights to go back to, no input that has been read, no gradients gathered, no phase that sits out and
        shows what it showed last."""
        best = (
            self.patience is not None and self.patience.policy.restore_best and self.patience.best_epoch >= 0
        )
        resting = any(phase.every > 1 for phase in self.job.phases or ())
        return not (best or resting or self.course.streamed or self.job.accumulate > 1)

    def count(self, row: MetricRow) -> None:
        """Adds a chunk's sums to the running epoch."""
        self.steps += row.steps
        self.samples += row.samples
        for metric, value in row.sums.items():
            self.sums[metric] = self.sums.get(metric, 0.0) + value

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Writes an epoch's metrics into the history."""
        for name, value in metrics.items():
            column = self.history.setdefault(name, [])
            if name in self._epochs_of or len(column) < self.epochs_ended:
                self._epochs_of.setdefault(name, list(range(len(column)))).append(self.epochs_ended)
            column.append(value)
        self.epochs_ended += 1
        self.steps_at_end = self.steps

    @property
    def holding(self) -> Holding:
        """What its weights are. Between the ends of two epochs the metrics are the last that were measured."""
        if self.held is not None:
            return self.held
        is_whole = self.epochs_ended > 0 and self.steps == self.steps_at_end
        epoch = self.restored if self.restored is not None else self.epochs_ended - 1 if is_whole else None
        return Holding(epoch, self._metrics_of(epoch))

    def tear(self) -> None:
        """It raised in a step: its weights may hold a part of it."""
        self.held = Holding(None, self._metrics_of(None))

    def _metrics_of(self, epoch: int | None) -> dict[str, float]:
        """Each metric as it was at the end of this epoch, or last before it; None for the last of all."""
        counts = {
            name: len(column)
            if epoch is None
            else bisect_right(self._epochs_of.get(name, range(len(column))), epoch)
            for name, column in self.history.items()
        }
        return {name: self.history[name][count - 1] for name, count in counts.items() if count}

    def epoch_metrics(self) -> dict[str, float]:
        """The running epoch's means; the next epoch starts at zero."""
        means = {metric: value / max(1, self.samples) for metric, value in self.sums.items()}
        self.sums, self.samples = {}, 0
        return means
