"""What the user asks for: a model, its data, how to train it. Frozen, and checked when it is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Number
from typing import Any

from carpool.arguments import MOST, Arguments, hinted
from carpool.errors import (
    DataError,
    JobError,
    LossError,
    ModelError,
    NameTakenError,
    OptimizerError,
    OptionError,
    meant,
    sentence,
    shown,
)
from carpool.functions import named_function
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
        if self.scheduler is None:
            raise OptimizerError(sentence("a scheduler, or a function that makes one", "None", _SCHEDULER))
        _refuse_plain("scheduler", self.scheduler, "")
        if self.every not in ("auto", "step", "epoch"):
            raise OptionError(
                sentence('every="auto", "step" or "epoch"', shown(self.every), "pass one of the three")
            )
        if self.monitor is not None:
            Arguments().text("a metric's name as monitor", self.monitor, 'pass monitor="val_loss"')


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
            raise LossError(sentence("a phase's step to be a function", shown(self.step), "pass a callable"))
        if self.name is None:
            object.__setattr__(self, "name", getattr(self.step, "__name__", "phase").strip("<>"))
        Arguments(NameTakenError).text("a phase's name", self.name, "name it, or leave name out")
        about = f"Phase {self.name!r}: "
        if self.optimizer is None:
            expected = "an optimizer, or a function that makes one"
            raise OptimizerError(about + sentence(expected, "None", named_function("optimizer", "adam")))
        _refuse_plain("optimizer", self.optimizer, about)
        _refuse_plain("scheduler", self.scheduler, about)
        says = Arguments(JobError)
        every = says.whole("a phase's every", self.every, "pass every=1 or more", least=1, most=MOST)
        object.__setattr__(self, "every", every)
        if self.of is not None:
            says.text("a submodule's name as of", self.of, "name one, or leave of= out")


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
        if self.name is not None:
            Arguments(NameTakenError).text("a name", self.name, "name the job, or leave name out")
        if self.model is None:
            raise ModelError(self._says("a model, or a function that makes one", "None", "see Job.model"))
        if self.data is None:
            raise DataError(self._says("data", "None", "pass data=(x, y)"))
        self._check_numbers()
        self._check_kinds()
        self._check_objective()
        self._check_phases()
        self._check_apart()
        if self.precision not in PRECISIONS:
            raise OptionError(
                self._says(
                    f"a precision out of {', '.join(PRECISIONS)}", shown(self.precision), "pass one of these"
                )
            )
        if self.budget is not None:
            size(self.budget, f"Job {self.name!r}: budget")
        self._check_stop()

    def _check_numbers(self) -> None:
        """Each made plain: the axes of a grid may be NumPy arrays."""
        says = self._arguments
        made: dict[str, Any] = {}
        for field, (remedy, least, most) in _WHOLE.items():
            made[field] = says.whole(field, getattr(self, field), remedy, least, most)
        if abs(made["priority"]) > _MOST_PRIORITY:
            raise says.wrong(
                "a priority from -16 to 16", str(self.priority), "each step doubles what it gets"
            )
        if self.clip_norm is not None:
            made["clip_norm"] = says.number(
                "a clip_norm", self.clip_norm, "pass a positive norm or None", above=0
            )
        made["shuffle"] = says.flag("shuffle", self.shuffle)
        for field, value in made.items():
            object.__setattr__(self, field, value)

    def _check_kinds(self) -> None:
        says = self._arguments
        for field in ("optimizer", "scheduler"):
            _refuse_plain(field, getattr(self, field), says.about)
        if self.config is not None:
            says.mapping("config", self.config, 'pass config={"lr": 0.1}')
        if self.fit is not None:
            says.mapping("fit", self.fit, 'pass fit={"validation_split": 0.2}')
        for callback in says.listed("callbacks", self.callbacks, "pass callbacks=[callback]"):
            if not callable(callback) and not hasattr(callback, "on_epoch_end"):
                remedy = "pass a function of an epoch's event; beside a Keras model, Keras' own callbacks"
                raise says.wrong("callbacks that are functions", shown(callback), remedy)

    @property
    def _arguments(self) -> Arguments:
        return Arguments(JobError, f"Job {self.name!r}: ")

    def _check_apart(self) -> None:
        says = self._arguments
        share = says.share("share", self.share, "pass share=0.25, or None")
        object.__setattr__(self, "share", share)
        object.__setattr__(self, "timeout_s", says.seconds("timeout_s", self.timeout_s))

    def _check_phases(self) -> None:
        if self.phases is None:
            return
        if not isinstance(self.phases, Sequence) or not self.phases:
            raise JobError(
                self._says("at least one phase", shown(self.phases), "pass phases=[carpool.Phase(...)]")
            )
        for phase in self.phases:
            if not isinstance(phase, Phase):
                raise JobError(self._says("carpool.Phase objects as phases", shown(phase), "pass Phase(...)"))
            if phase.name == "val":
                expected = 'a name whose loss is not "val_loss", which validation shows'
                raise NameTakenError(self._says(expected, "a phase named 'val'", "name it otherwise"))
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
                remedy = named_function(word, value) or f"pass a callable as {word}="
                raise LossError(self._says(f"{word} to be a function", shown(value), remedy))
        if self.metrics is not None:
            self._check_metrics(self.metrics)

    def _check_metrics(self, metrics: Any) -> None:
        says = Arguments(LossError, f"Job {self.name!r}: ")
        if not isinstance(metrics, Mapping):
            given = list(metrics) if isinstance(metrics, list | tuple) else [metrics]
            listed = ", ".join(f'"{_name_of(one)}": {_name_of(one)}' for one in given)
            raise says.wrong("metrics as a dict of functions by name", shown(metrics), f"pass {{{listed}}}")
        for word, metric in says.mapping("metrics", metrics, 'pass metrics={"accuracy": accuracy}').items():
            if not callable(metric):
                remedy = named_function("metric", metric) or "pass a callable"
                raise says.wrong(f"metric {word!r} to be a function", shown(metric), remedy)
            if word == "loss" or word.startswith("val_") or not word.strip():
                expected = 'metrics with names of their own ("loss" is what is minimised, "val_" what validation shows)'
                raise says.wrong(expected, repr(word), "rename it")

    def _check_stop(self) -> None:
        if self.stop is None:
            return
        if not isinstance(self.stop, EarlyStopping):
            raise OptionError(
                self._says("stop=EarlyStopping(...)", shown(self.stop), "pass carpool.EarlyStopping(...)")
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
                    meant(self.stop.metric, [*known, *(f"val_{name}" for name in known)])
                    or "name one of these, or add it to metrics=",
                )
            )

    def _says(self, expected: str, received: str, remedy: str) -> str:
        return f"Job {self.name!r}: " + sentence(expected, received, remedy)


_SCHEDULER = "pass a function of the optimizer: partial(StepLR, step_size=10)"
_MOST_PRIORITY = 16
_WHOLE: dict[str, tuple[str, int | None, int | None]] = {
    "batch_size": ("pass batch_size=32", 1, MOST),
    "epochs": ("pass epochs=1 or more", 1, 1 << 31),
    "seed": ("pass seed=0", None, None),
    "accumulate": ("pass accumulate=1, or how many batches make an update", 1, MOST),
    "priority": ("pass priority=0", None, None),
    "prefetch": ("pass prefetch=2", 1, 1 << 20),
}
"""Remedy, least and most of each field that is a whole number."""


def _refuse_plain(word: str, value: Any, about: str) -> None:
    """Names of optimizers and schedulers say neither which framework's nor with which numbers; numbers and lists say nothing."""
    if isinstance(value, str | bytes | Number | list):
        name = value if isinstance(value, str) else "adam"
        remedy = _SCHEDULER if word == "scheduler" else named_function(word, name)
        expected = f"{'an' if word == 'optimizer' else 'a'} {word}, or a function that makes one"
        raise OptimizerError(about + sentence(expected, shown(value), remedy))


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", function)).strip("<>")


# Whoever misspells a field is told its name; the class itself stays an ordinary dataclass.
for _kind in (Job, Phase, Schedule):
    _kind.__init__ = hinted(_kind.__init__)  # type: ignore[method-assign]


def check_names(job: Job | None, names: Collection[Any]) -> None:
    """Refuses what a step shows under a name that is another's in the history: one would replace the other."""
    about = "" if job is None else f"Job {job.name!r}: "
    stray = next((name for name in names if not isinstance(name, str)), None)
    if stray is not None:
        raise LossError(
            about + sentence("names of values that are text", shown(stray), 'return {"loss": ...}')
        )
    if job is None or job.validation_data is None:
        return
    twin = next((name for name in names if name.startswith("val_") and name[4:] in names), None)
    if twin is not None:
        expected = f"{twin!r} to be what validation shows of {twin[4:]!r}"
        raise LossError(about + sentence(expected, f"a value {twin!r} of a training step too", "rename it"))


def share_of(jobs: Iterable[Job]) -> float | None:
    """What jobs that run as one may use of a GPU's processors: their shares together; None where nobody says.

    >>> make = lambda share: Job(dict, ([1.0], [2.0]), loss=max, share=share)
    >>> share_of([make(0.25), make(0.5)]), share_of([make(0.75), make(0.75)]), share_of([make(None)])
    (0.75, 1.0, None)
    """
    shares = [job.share for job in jobs if job.share is not None]
    return min(1.0, sum(shares)) if shares else None


def given(jobs: Job | Iterable[Job]) -> Iterable[Job]:
    """The jobs as they are given; one alone is a list of one."""
    if isinstance(jobs, Job):
        return (jobs,)
    if isinstance(jobs, Mapping):
        remedy = "pass a list: [job, ...], each with its name="
        raise JobError(sentence("a list of carpool.Job", shown(jobs), remedy))
    if not isinstance(jobs, Iterable):
        raise JobError(sentence("a list of carpool.Job", shown(jobs), "pass [carpool.Job(...), ...]"))
    return jobs


def named(jobs: Job | Iterable[Job]) -> tuple[Job, ...]:
    """The jobs as a tuple, each with a name of its own.

    >>> make = lambda name=None: Job(dict, ([1.0], [2.0]), loss=max, name=name)
    >>> [job.name for job in named([make("a"), make()])]
    ['a', 'job-1']
    """
    listed = tuple(given(jobs))
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
