"""From a job to live torch objects: factories called, optimizers and schedulers matched to the model, data as tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils import _pytree as pytree

from carpool.adapters.torch.precision import computing_in
from carpool.errors import DataError, LossError, ModelError, OptimizerError, sentence
from carpool.job import Job, Schedule
from carpool.random import signed_seed

Step = Callable[[nn.Module, Any], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Arrays:
    """A nest of tensors with one first dimension, and the view of it that a job reads."""

    tensors: tuple[torch.Tensor, ...]
    nest: Any
    index: torch.Tensor | None = None
    flat: bool = False
    """Whether the nest is a plain tuple, which needs no unflattening."""

    @property
    def length(self) -> int:
        return len(self.index) if self.index is not None else len(self.tensors[0])

    def batch(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Tensors put back into the shape of the user's nest."""
        if self.flat:
            return tuple(tensors)
        return pytree.tree_unflatten(list(tensors), self.nest)


@dataclass
class Timer:
    """A scheduler and when it steps."""

    scheduler: LRScheduler | ReduceLROnPlateau
    every: str
    monitor: str | None

    def step_epoch(self, metrics: dict[str, float]) -> None:
        if self.every != "epoch":
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            return
        watched = self.monitor or ("val_loss" if "val_loss" in metrics else "loss")
        if watched not in metrics:
            raise KeyError(
                sentence(
                    f"ReduceLROnPlateau to watch one of {', '.join(metrics)}",
                    repr(watched),
                    "name one of these",
                )
            )
        self.scheduler.step(metrics[watched])


@dataclass
class Built:
    """A job's live objects."""

    job: Job
    model: nn.Module
    optimizer: Optimizer
    timer: Timer | None
    data: Arrays
    validation: Arrays | None
    step: Step

    @property
    def seed(self) -> int:
        return signed_seed(self.job.seed)


def build_model(job: Job) -> nn.Module:
    """The model itself, or what its factory makes under the job's seed."""
    made = job.model
    if isinstance(made, str):
        made = _imported(made)
    if not isinstance(made, nn.Module):
        with seeded(job.seed):
            made = made()
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"Job {job.name!r}: "
            + sentence(
                "a torch.nn.Module or a function that makes one",
                type(made).__name__,
                "return the module from the factory",
            )
        )
    return made


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            sentence('a model as "module:function"', repr(path), f"make it importable ({error})")
        ) from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's generators seeded inside, and back as they were outside."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        reseed(seed)
        yield


def reseed(seed: int) -> None:
    """What `torch.manual_seed` does, for the generators that exist.

    While CUDA sleeps, torch's own function stores a stack trace for each call until it wakes: 1 ms and a leak.
    """
    torch.default_generator.manual_seed(seed & 0xFFFFFFFFFFFFFFFF)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed & 0xFFFFFFFFFFFFFFFF)


def build_optimizer(job: Job, model: nn.Module) -> Optimizer:
    """The optimizer itself, or what its factory makes over the model's parameters."""
    made = job.optimizer
    if made is None:
        raise OptimizerError(
            _says(job, "an optimizer", "None", "pass optimizer=partial(torch.optim.AdamW, lr=1e-3)")
        )
    if not isinstance(made, Optimizer):
        if not callable(made):
            raise OptimizerError(
                _says(job, "an optimizer or a function of parameters", repr(made), "pass a factory")
            )
        made = made(list(model.parameters()))
    if not isinstance(made, Optimizer):
        raise OptimizerError(
            _says(job, "the factory to return a torch optimizer", type(made).__name__, "return the optimizer")
        )
    ours = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in ours for group in made.param_groups for p in group["params"])
    if foreign:
        raise OptimizerError(
            _says(
                job,
                "an optimizer over this job's model's parameters",
                f"{foreign} parameters that are not the model's",
                "build the optimizer from the same model object, or pass a factory",
            )
        )
    return made


def build_timer(job: Job, optimizer: Optimizer) -> Timer | None:
    """The scheduler itself, or what its factory makes over the optimizer, and when it steps."""
    if job.scheduler is None:
        return None
    wish = job.scheduler if isinstance(job.scheduler, Schedule) else Schedule(job.scheduler)
    made = wish.scheduler
    if not isinstance(made, LRScheduler | ReduceLROnPlateau):
        made = made(optimizer)
    if not isinstance(made, LRScheduler | ReduceLROnPlateau) or made.optimizer is not optimizer:
        raise OptimizerError(
            _says(
                job,
                "a scheduler of the job's own optimizer",
                type(made).__name__,
                "pass a factory: partial(StepLR, step_size=10)",
            )
        )
    _check_monitor(job, wish.monitor)
    by_step = isinstance(made, OneCycleLR | CyclicLR)
    every = wish.every if wish.every != "auto" else ("step" if by_step else "epoch")
    if every == "step" and isinstance(made, ReduceLROnPlateau):
        raise OptimizerError(
            _says(job, "ReduceLROnPlateau to step by epoch", 'every="step"', "leave every out")
        )
    return Timer(made, every, wish.monitor)


def _check_monitor(job: Job, monitor: str | None) -> None:
    known = ["loss", *(job.metrics or {})]
    known += [f"val_{name}" for name in known] if job.validation_data is not None else []
    if monitor is not None and job.step is None and monitor not in known:
        raise OptimizerError(
            _says(job, f"a monitor out of {', '.join(known)}", repr(monitor), "name one of these")
        )


def build_step(job: Job) -> Step:
    """The job's objective in one form, in its own precision: (model, batch) to a dict of scalars with "loss" in it."""
    objective = _objective(job)

    def step(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        device = next((leaf.device.type for leaf in model.parameters()), "cpu")
        with computing_in(job.precision, device):
            return objective(model, batch)

    return step


def _objective(job: Job) -> Step:
    if job.step is not None:
        return _full_step(job)
    if job.loss is None:
        raise LossError(_says(job, "loss= or step=", "neither", "pass loss=F.cross_entropy, say"))
    loss, metrics = job.loss, dict(job.metrics or {})

    def step(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        prediction = model(*x) if isinstance(x, tuple | list) else model(x)
        values = {name: metric(prediction, y) for name, metric in metrics.items()}
        return {
            "loss": _scalar(job, "loss", loss(prediction, y)),
            **{k: _scalar(job, k, v) for k, v in values.items()},
        }

    return step


def _full_step(job: Job) -> Step:
    def step(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        assert job.step is not None
        made = job.step(model, batch)
        values = made if isinstance(made, dict) else {"loss": made}
        if "loss" not in values:
            raise LossError(
                _says(job, 'step to return a loss or a dict with "loss"', ", ".join(values), 'add "loss"')
            )
        return {name: _scalar(job, name, value) for name, value in values.items()}

    return step


def _scalar(job: Job, name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise LossError(
            _says(job, f"{name} to be a tensor", type(value).__name__, "return a tensor, not a number")
        )
    if value.numel() != 1:
        raise LossError(
            _says(job, f"{name} to be a scalar", f"shape {tuple(value.shape)}", "reduce it, with .mean() say")
        )
    return value.reshape(())


def build_data(job: Job, data: Any, index: Any, word: str) -> Arrays:
    """The user's nest of arrays as tensors that share their memory, checked."""
    if isinstance(data, torch.utils.data.TensorDataset):
        data = data.tensors
    leaves, nest = pytree.tree_flatten(data)
    if not leaves:
        raise DataError(_says(job, f"arrays as {word}", "none", "pass a tuple of arrays (x, y)"))
    if job.step is None and not (isinstance(data, tuple | list) and len(data) == 2):
        raise DataError(
            _says(job, f"{word}=(x, y) beside loss=", type(data).__name__, "pass a pair, or use step=")
        )
    tensors = tuple(_tensor(job, leaf, word) for leaf in leaves)
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise DataError(_says(job, f"arrays of one length as {word}", f"lengths {lengths}", "align x and y"))
    flat = type(data) is tuple and len(data) == len(leaves)
    arrays = Arrays(tensors, nest, _index(job, index, lengths[0]), flat)
    if arrays.length == 0:
        raise DataError(
            _says(job, f"at least one sample as {word}", "0", "pass more data, or leave the job out")
        )
    return arrays


def _tensor(job: Job, leaf: Any, word: str) -> torch.Tensor:
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf)
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        raise DataError(
            _says(
                job,
                f"NumPy arrays or torch tensors as {word}",
                type(leaf).__name__,
                "convert it, with torch.as_tensor say",
            )
        )
    return leaf.detach()


def _index(job: Job, index: Any, length: int) -> torch.Tensor | None:
    if index is None:
        return None
    view = torch.as_tensor(np.asarray(index)).reshape(-1)
    if view.dtype == torch.bool:
        view = view.nonzero().reshape(-1)
    view = view.to(torch.int64)
    if len(view) and (int(view.min()) < 0 or int(view.max()) >= length):
        raise DataError(
            _says(
                job,
                f"index within 0..{length - 1}",
                f"{int(view.min())}..{int(view.max())}",
                "index the data that was passed",
            )
        )
    return view


def _says(job: Job, expected: str, received: str, remedy: str) -> str:
    return f"Job {job.name!r}: " + sentence(expected, received, remedy)
