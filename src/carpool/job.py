"""What the user asks for: a model, its data, how to train it. Frozen, and checked when it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from typing import Any

from carpool.errors import DataError, JobError, LossError, NameTakenError, OptionError, sentence
from carpool.memory.size import Size, size
from carpool.stopping import EarlyStopping

PRECISIONS = ("inherit", "float32", "bf16")


@dataclass(frozen=True)
class Schedule:
    """A learning-rate scheduler with the moment it steps said out loud.

    Without it a scheduler steps once an epoch, except those PyTorch documents as stepping every batch
    (OneCycleLR, CyclicLR). `monitor` is the metric that ReduceLROnPlateau is given.

    >>> Schedule(print, every="step").every
    'step'
    """

    scheduler: Any
    every: str = "auto"
    monitor: str | None = None

    def __post_init__(self) -> None:
        if self.every not in ("auto", "step", "epoch"):
            raise OptionError(
                sentence('every="auto", "step" or "epoch"', repr(self.every), "pass one of the three")
            )


@dataclass(frozen=True)
class Phase:
    """One of several updates of a training step, as a GAN's discriminator and generator have.

    `step(model, batch) -> loss or {"loss": ..., **metrics}`; only the parameters that the phase's optimizer holds get a
    gradient of it. `of` names the submodule whose parameters the optimizer's factory is given (all of the model's, if
    left out). A phase runs at the steps, counted from 0, that `every` divides. Its loss is shown as "<name>_loss".

    >>> Phase(max, print, of="generator").name
    'max'
    """

    step: Callable[..., Any]
    optimizer: Any
    scheduler: Any = None
    every: int = 1
    of: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise LossError(sentence("a phase's step to be a function", repr(self.step), "pass a callable"))
        if self.name is None:
            object.__setattr__(self, "name", getattr(self.step, "__name__", "phase").strip("<>"))
        if not (isinstance(self.name, str) and self.name.strip()):
            raise NameTakenError(sentence("a phase's name", repr(self.name), "name it, or leave name out"))
        if not isinstance(self.every, Integral) or isinstance(self.every, bool) or self.every < 1:
            raise JobError(
                sentence("a phase's every of at least 1", repr(self.every), "pass every=1 or more")
            )


@dataclass(frozen=True, eq=False)
class Job:
    """A model, its data and how to train it.

    `model` is an object, a factory called under the job's seed, or "module:function". `data` is a tuple of arrays
    `(x, y)`, any nest of arrays when `step` is given, something that gives batches (a DataLoader, a Dataset, an iterable,
    a carpool.data.Queue; `prefetch` are read ahead), or a function that returns one of these. Exactly one of
    `loss(prediction, target)` and `step(model, batch) -> loss or {"loss": ..., **metrics}` says what is minimised.
    A LightningModule says both itself, in its training_step and configure_optimizers.
    `phases` says instead that a training step is several updates, each with a step and an optimizer of its own.
    `index` trains on a view of the data (a fold, a bootstrap sample) without copying it. Modules stay in the
    train/eval mode they are in. `precision` is what forward pass and loss compute in: "bf16" and "float32" turn
    autocast on and off, "inherit" leaves it as it is around the call; weights and optimizer keep their type.
    `accumulate=n` updates at every n-th batch and at an epoch's last, by the sum of the gradients of loss / n.
    `budget`, a size such as "2GiB", is the device memory that the job may take: one that needs more is refused before anything runs.
    Where jobs share a device by time, one of priority p gets 2**p times as much as one of 0.
    `share` is the part of a GPU's processors that the job may use: processors of its own in this process where the driver and the
    framework can do that, otherwise in a process of its own, where NVIDIA's MPS runs. With `timeout_s` the job is stopped
    when it makes no progress for so long. Only a process of its own can keep that: such a job is isolated.
    A compiled Keras model says all of its objective itself; `fit` holds arguments of its `fit` that a Job has no word for, such as
    `{"class_weight": ..., "validation_split": 0.2}`, and `callbacks` are Keras' own.

    >>> job = Job(model=dict, data=([1.0], [2.0]), loss=lambda p, t: 0.0, name="a")
    >>> job.name, job.batch_size
    ('a', 32)
    """

    model: Any
    data: Any
    _: KW_ONLY
    name: str | None = None
    config: Mapping[str, Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    step: Callable[..., Any] | None = None
    optimizer: Any = None
    scheduler: Any = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    validation_data: Any = None
    batch_size: int = 32
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    index: Any = None
    clip_norm: float | None = None
    precision: str = "inherit"
    accumulate: int = 1
    phases: Sequence[Phase] | None = None
    stop: EarlyStopping | None = None
    callbacks: Sequence[Any] = ()
    budget: Size | None = None
    priority: int = 0
    prefetch: int = 2
    share: float | None = None
    timeout_s: float | None = None
    fit: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip()):
            raise NameTakenError(sentence("a name", repr(self.name), "name the job, or leave name out"))
        if self.data is None:
            raise DataError(self._says("data", "None", "pass data=(x, y)"))
        _whole(self, "batch_size", "pass batch_size=32", least=1)
        _whole(self, "epochs", "pass epochs=1 or more", least=1)
        _whole(self, "seed", "pass seed=0")
        _whole(self, "accumulate", "pass accumulate=1, or how many batches make an update", least=1)
        _whole(self, "priority", "pass priority=0")
        if abs(self.priority) > 16:
            raise JobError(
                self._says("a priority from -16 to 16", str(self.priority), "each step doubles the share")
            )
        _whole(self, "prefetch", "pass prefetch=2", least=1)
        self._check_objective()
        self._check_phases()
        self._check_apart()
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise JobError(
                self._says("a clip_norm above 0", str(self.clip_norm), "pass a positive norm or None")
            )
        if self.precision not in PRECISIONS:
            raise OptionError(
                self._says(
                    f"a precision out of {', '.join(PRECISIONS)}", repr(self.precision), "pass one of these"
                )
            )
        if self.budget is not None:
            size(self.budget, f"Job {self.name!r}: budget")
        self._check_stop()

    def _check_apart(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise JobError(
                self._says("a share above 0 and up to 1", repr(self.share), "pass share=0.25, or None")
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise JobError(self._says("a timeout_s above 0", repr(self.timeout_s), "pass seconds, or None"))

    def _check_phases(self) -> None:
        if self.phases is None:
            return
        if not isinstance(self.phases, Sequence) or not self.phases:
            raise JobError(
                self._says("at least one phase", repr(self.phases), "pass phases=[carpool.Phase(...)]")
            )
        for phase in self.phases:
            if not isinstance(phase, Phase):
                raise JobError(self._says("carpool.Phase objects as phases", repr(phase), "pass Phase(...)"))
        for word in ("loss", "step", "optimizer", "scheduler", "metrics"):
            if getattr(self, word) is not None:
                raise JobError(
                    self._says(f"either phases= or {word}=", "both", f"say the {word} in each phase instead")
                )
        if self.accumulate > 1:
            raise JobError(
                self._says("phases without accumulate", str(self.accumulate), "leave one of them out")
            )

    def _check_objective(self) -> None:
        if self.loss is not None and self.step is not None:
            raise LossError(self._says("either loss= or step=", "both", "keep one of them"))
        for word, value in (("loss", self.loss), ("step", self.step)):
            if value is not None and not callable(value):
                raise LossError(
                    self._says(f"{word} to be a function", repr(value), f"pass a callable as {word}=")
                )
        for word, metric in (self.metrics or {}).items():
            if not callable(metric):
                raise LossError(
                    self._says(f"metric {word!r} to be a function", repr(metric), "pass a callable")
                )

    def _check_stop(self) -> None:
        if self.stop is None:
            return
        if not isinstance(self.stop, EarlyStopping):
            raise OptionError(
                self._says("stop=EarlyStopping(...)", repr(self.stop), "pass carpool.EarlyStopping(...)")
            )
        if self.stop.metric.startswith("val_") and self.validation_data is None:
            raise OptionError(
                self._says(
                    f"validation_data to watch {self.stop.metric!r}",
                    "none",
                    "pass validation_data or watch 'loss'",
                )
            )
        known = {"loss", *(self.metrics or {})}
        if self.loss is not None and self.stop.metric.removeprefix("val_") not in known:
            raise OptionError(
                self._says(
                    f"EarlyStopping to watch one of {', '.join(sorted(known))} (or its val_ twin)",
                    repr(self.stop.metric),
                    "name one of these, or add it to metrics=",
                )
            )

    def _says(self, expected: str, received: str, remedy: str) -> str:
        return f"Job {self.name!r}: " + sentence(expected, received, remedy)


def _whole(job: Job, field: str, remedy: str, least: int | None = None) -> None:
    """Checks a field and makes it a plain integer: the axes of a grid may be NumPy arrays."""
    value = getattr(job, field)
    expected = "that is a whole number" if least is None else f"of at least {least}"
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):
        raise JobError(job._says(f"{field} {expected}", repr(value), remedy))
    object.__setattr__(job, field, int(value))


def share_of(jobs: Iterable[Job]) -> float | None:
    """What jobs that run as one may use of a GPU's processors: their shares together; None where nobody says.

    >>> make = lambda share: Job(dict, ([1.0], [2.0]), loss=max, share=share)
    >>> share_of([make(0.25), make(0.5)]), share_of([make(0.75), make(0.75)]), share_of([make(None)])
    (0.75, 1.0, None)
    """
    shares = [job.share for job in jobs if job.share is not None]
    return min(1.0, sum(shares)) if shares else None


def named(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs as a tuple, each with a name of its own.

    >>> make = lambda name=None: Job(dict, ([1.0], [2.0]), loss=max, name=name)
    >>> [job.name for job in named([make("a"), make()])]
    ['a', 'job-1']
    """
    listed = tuple(jobs)
    if not listed:
        raise JobError(sentence("at least one job", "none", "pass a list of carpool.Job"))
    for position, job in enumerate(listed):
        if not isinstance(job, Job):
            raise JobError(
                sentence(
                    "carpool.Job objects",
                    f"{type(job).__name__} at position {position}",
                    "build jobs with carpool.Job",
                )
            )
    result = tuple(
        job if job.name is not None else replace(job, name=f"job-{i}") for i, job in enumerate(listed)
    )
    first: dict[str, int] = {}
    for position, job in enumerate(result):
        if (other := first.setdefault(str(job.name), position)) != position:
            raise NameTakenError(
                sentence(
                    "every job to have a name of its own",
                    f"{job.name!r} at positions {other} and {position}",
                    "rename one",
                )
            )
    return result
