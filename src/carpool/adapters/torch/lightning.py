"""LightningModules without Lightning: their training_step, validation_step and configure_optimizers, and what these ask for.

A module is known by what it has, so the package need not be installed. There is no Trainer: a hook that only a Trainer
would call is refused, never skipped in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from carpool.adapters.torch.build import (
    LivePhase,
    ManualStep,
    Step,
    Timer,
    build_optimizer,
    build_timer,
    in_precision,
    says,
    scalar,
    scalars,
)
from carpool.adapters.torch.precision import computing_in
from carpool.errors import JobError, LossError, ModelError, OptimizerError, StepError, sentence
from carpool.job import Job

_MARKS = ("training_step", "configure_optimizers", "automatic_optimization")
_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch")
_HOOKS = frozenset(
    [
        "setup",
        "teardown",
        "prepare_data",
        "configure_model",
        "configure_gradient_clipping",
        "configure_callbacks",
        "lr_scheduler_step",
        "optimizer_step",
        "optimizer_zero_grad",
        "backward",
        "transfer_batch_to_device",
    ]
)
_HARMLESS = ("on_test_", "on_predict_", "on_save_checkpoint", "on_load_checkpoint")


def is_lightning(job: Job, model: nn.Module) -> bool:
    """Whether the model says itself how it is trained, and the job does not."""
    return (
        job.loss is None
        and job.step is None
        and job.phases is None
        and all(hasattr(type(model), mark) or mark in vars(model) for mark in _MARKS)
    )


def is_manual(model: Any) -> bool:
    return not model.automatic_optimization


def check_hooks(job: Job, model: nn.Module) -> None:
    """Refuses a module with a hook of its own that nothing here would call."""
    own = [kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] not in _PACKAGES]
    written = {name for kind in own for name, value in vars(kind).items() if callable(value)}
    hooks = sorted(
        name
        for name in written
        if name in _HOOKS or (name.startswith("on_") and not name.startswith(_HARMLESS))
    )
    if hooks:
        raise ModelError(
            says(
                job,
                "a LightningModule without hooks that only a Trainer calls",
                ", ".join(hooks),
                "do it in training_step, validation_step or a callback of the job, or leave it out",
            )
        )


# Optimizers


def build_lightning_phases(job: Job, model: Any) -> tuple[LivePhase, ...]:
    """The module's optimizers; with automatic optimization there is one, and its objective is training_step."""
    check_hooks(job, model)
    pairs = _own_pairs(job, model) if job.optimizer is not None else _configured(job, model)
    if is_manual(model):
        _check_manual(job)
        names = [""] if len(pairs) == 1 else [str(number) for number in range(len(pairs))]
        step = _training(job)
        return tuple(LivePhase(name, step, *pair) for name, pair in zip(names, pairs, strict=True))
    if len(pairs) > 1:
        raise OptimizerError(
            says(
                job,
                "one optimizer with automatic optimization",
                f"{len(pairs)} from configure_optimizers",
                "set automatic_optimization = False, or pass phases=",
            )
        )
    return (LivePhase("", in_precision(job, _training(job)), *pairs[0]),)


def _check_manual(job: Job) -> None:
    for word, given in (("clip_norm", job.clip_norm is not None), ("accumulate", job.accumulate > 1)):
        if given:
            raise JobError(
                says(job, f"no {word} where automatic_optimization is False", word, "do it in training_step")
            )


def _own_pairs(job: Job, model: nn.Module) -> list[tuple[Optimizer, Timer | None]]:
    optimizer = build_optimizer(job, job.optimizer, model)
    return [(optimizer, build_timer(job, job.scheduler, optimizer))]


def _configured(job: Job, model: Any) -> list[tuple[Optimizer, Timer | None]]:
    """What configure_optimizers returned, in any of its documented forms."""
    with _standing(model, {}):
        made = model.configure_optimizers()
    schedulers: list[Any] = []
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, list) for part in made):
        optimizers, schedulers = made
    elif isinstance(made, Mapping):
        optimizers = [made]
    else:
        optimizers = list(made) if isinstance(made, list | tuple) else [made]
    for one in optimizers:
        if isinstance(one, Mapping) and "lr_scheduler" in one:
            schedulers.append(one["lr_scheduler"])
    plain = [one["optimizer"] if isinstance(one, Mapping) else one for one in optimizers]
    if not plain or not all(isinstance(one, Optimizer) for one in plain):
        raise OptimizerError(
            says(job, "configure_optimizers to return torch optimizers", repr(made)[:80], "return one")
        )
    timers = [_timer(job, one, manual=is_manual(model)) for one in schedulers]
    found = {id(timer.scheduler.optimizer): timer for timer in timers}
    return [(build_optimizer(job, one, model), found.get(id(one))) for one in plain]


def _timer(job: Job, wish: Any, manual: bool) -> Timer:
    config = dict(wish) if isinstance(wish, Mapping) else {"scheduler": wish}
    scheduler, interval = config["scheduler"], config.get("interval", "epoch")
    if interval not in ("epoch", "step"):
        raise OptimizerError(says(job, 'interval "epoch" or "step"', repr(interval), "pass one of the two"))
    if interval == "step" and isinstance(scheduler, ReduceLROnPlateau):
        raise OptimizerError(
            says(job, "ReduceLROnPlateau to step by epoch", 'interval="step"', "leave interval out")
        )
    every = "manual" if manual else interval
    return Timer(scheduler, every, config.get("monitor"), int(config.get("frequency", 1)))


# Steps


def _training(job: Job) -> Step:
    def step(model: Any, batch: Any, place: Any) -> dict[str, torch.Tensor]:
        logged: dict[str, Any] = {}
        with _standing(model, logged):
            made = _call(model.training_step, batch, place)
        return {**logged, **scalars(job, made)}

    return step


def validation(job: Job, model: nn.Module) -> Step:
    """The module's validation_step: what it returns as a loss, and what it logs, "val_" left out."""
    if job.validation_data is not None and not _is_written(model, "validation_step"):
        raise ModelError(
            says(job, "a validation_step for validation_data", "none", "write one, or leave the data out")
        )

    def step(model: Any, batch: Any, place: Any) -> dict[str, torch.Tensor]:
        logged: dict[str, Any] = {}
        with _standing(model, logged):
            made = _call(model.validation_step, batch, place)
        values = {name.removeprefix("val_"): value for name, value in logged.items()}
        if len(values) < len(logged):
            twice = next(name for name in logged if f"val_{name}" in logged)
            received = f"both {twice!r} and 'val_{twice}'"
            raise LossError(says(job, "validation_step to log each value once", received, "log one of them"))
        if made is not None:
            values |= made if isinstance(made, Mapping) else {"loss": made}
        if not values:
            raise LossError(
                says(job, "validation_step to return or log a value", "none", 'self.log("val_loss", loss)')
            )
        return {name: scalar(job, name, value) for name, value in values.items()}

    return in_precision(job, step)


def manual(job: Job) -> ManualStep:
    """A training_step that takes its own optimizer steps."""

    def step(model: Any, batch: Any, place: int, phases: Sequence[LivePhase]) -> dict[str, float]:
        logged: dict[str, Any] = {}
        with (
            computing_in(job.precision, next(p.device.type for p in model.parameters())),
            _standing(model, logged, phases),
        ):
            made = _call(model.training_step, batch, place)
        values = dict(logged) | (dict(made) if isinstance(made, Mapping) else {})
        if isinstance(made, torch.Tensor):
            values["loss"] = made
        losses = [value for name, value in values.items() if name.endswith("loss")]
        if not losses:
            raise LossError(
                says(job, "training_step to return or log a loss", "none", 'self.log("loss", loss)')
            )
        values.setdefault("loss", sum(losses))
        return {name: float(value.detach()) for name, value in scalars(job, values).items()}

    return step


def _is_written(model: nn.Module, name: str) -> bool:
    written = getattr(type(model), name, None)
    return written is not None and written.__module__.partition(".")[0] not in _PACKAGES


def _call(function: Any, batch: Any, place: Any) -> Any:
    takes = len(inspect.signature(function).parameters)
    return function(batch, place) if takes > 1 else function(batch)


# What a module finds where a Trainer would be


class _NoTrainer:
    """Stands where a module looks for its Trainer: it knows the optimizers, and says so of everything else."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StepError(
            sentence(
                "a LightningModule that needs no Trainer", f"a look at its {name}", "pass it to the module"
            )
        )


@contextmanager
def _standing(model: Any, logged: dict[str, Any], phases: Sequence[LivePhase] = ()) -> Iterator[None]:
    """Gives the module stand-ins for what a Trainer would have provided, and takes them back."""
    optimizers = [phase.optimizer for phase in phases]
    schedulers = [phase.timer.scheduler for phase in phases if phase.timer is not None]

    def log(name: str, value: Any, *_: Any, reduce_fx: Any = "mean", **__: Any) -> None:
        if reduce_fx not in ("mean", torch.mean):
            raise LossError(
                sentence(f"{name!r} to be logged as a mean", repr(reduce_fx), "leave reduce_fx out")
            )
        if not isinstance(value, torch.Tensor | int | float):
            raise LossError(
                sentence(f"{name!r} to be logged as a number", type(value).__name__, "log a scalar tensor")
            )
        logged[name] = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))

    def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            log(name, value, *args, **kwargs)

    def clip_gradients(optimizer: Optimizer, gradient_clip_val: Any = None, **_: Any) -> None:
        if gradient_clip_val:
            clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]], gradient_clip_val
            )

    given = {
        "log": log,
        "log_dict": log_dict,
        "optimizers": lambda *_, **__: optimizers[0] if len(optimizers) == 1 else optimizers,
        "lr_schedulers": lambda: (schedulers[0] if len(schedulers) == 1 else schedulers) or None,
        "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        "clip_gradients": clip_gradients,
    }
    own = vars(model)
    if "_trainer" in own:
        given["_trainer"] = _NoTrainer(optimizers)
    if "_device" in own:
        given["_device"] = next((p.device for p in model.parameters()), torch.device("cpu"))
    before = {name: own[name] for name in given if name in own}
    own.update(given)
    try:
        yield
    finally:
        for name in given:
            del own[name]
        own.update(before)
