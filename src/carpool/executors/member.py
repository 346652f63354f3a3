"""A job on its way through a session."""

from __future__ import annotations

from dataclasses import dataclass, field

from carpool.adapters.base import MetricRow
from carpool.job import Job
from carpool.planning.cursor import Course, Cursor
from carpool.stopping import Patience


@dataclass
class Member:
    """A job on its way: where it stands and what it has shown so far."""

    job: Job
    course: Course
    cursor: Cursor = field(default_factory=Cursor)
    steps: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    patience: Patience | None = None
    epochs_ended: int = 0

    def __post_init__(self) -> None:
        if self.job.stop is not None:
            self.patience = Patience(self.job.stop)

    @property
    def name(self) -> str:
        return str(self.job.name)

    @property
    def decides(self) -> bool:
        """Whether something is decided at the end of each epoch, so that its metrics must be known at once."""
        job = self.job
        return bool(job.validation_data is not None or job.stop or job.callbacks or job.scheduler is not None)

    @property
    def through(self) -> bool:
        """Whether all its steps are enqueued."""
        return self.cursor.epoch == self.course.epochs

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

    def epoch_metrics(self) -> dict[str, float]:
        """The running epoch's means; the next epoch starts at zero."""
        means = {metric: value / max(1, self.samples) for metric, value in self.sums.items()}
        self.sums, self.samples = {}, 0
        return means
