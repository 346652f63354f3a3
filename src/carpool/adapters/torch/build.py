"""From a job to live torch objects: factories called, optimizers and schedulers matched to the model, data as tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils import _pytree as pytree

from carpool.adapters.named import imported
from carpool.adapters.torch.precision import computing_in
from carpool.arguments import missing
from carpool.errors import DataError, LossError, ModelError, OptimizerError, meant, sentence, shown
from carpool.job import Job, Schedule, check_names
from carpool.positions import positions
from carpool.random import signed_seed

Step = Callable[[nn.Module, Any, Any], dict[str, torch.Tensor]]
"""(model, batch, number of the batch in its epoch) to scalars by name."""
ManualStep = Callable[[nn.Module, Any, int, "Sequence[LivePhase]"], dict[str, float]]
"""(model, batch, number of the batch, phases whose optimizers it uses) to numbers by name."""


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
    frequency: int = 1
    turns: int = 0
    """How often it could have stepped so far; it does at every `frequency`-th time."""

    @property
    def by_step(self) -> bool:
        return self.every == "step"

    def step_update(self) -> None:
        """The optimizer has made an update."""
        if self.by_step and self._turn():
            self.scheduler.step()  # type: ignore[call-arg]  # ReduceLROnPlateau never steps by batch

    def _turn(self) -> bool:
        self.turns += 1
        return self.turns % self.frequency == 0

    def snapshot(self) -> tuple[Any, int]:
        return copy.deepcopy(self.scheduler.state_dict()), self.turns

    def restore(self, snapshot: tuple[Any, int]) -> None:
        state, self.turns = snapshot
        self.scheduler.load_state_dict(state)

    def step_epoch(self, metrics: dict[str, float]) -> None:
        """An epoch has ended, with these metrics."""
        if self.every != "epoch" or not self._turn():
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
class LivePhase:
    """One update of a training step: its objective, its optimizer and when they run. A plain job is one without a name."""

    name: str
    step: Step
    optimizer: Optimizer
    timer: Timer | None
    every: int = 1

    @property
    def loss(self) -> str:
        """What the objective calls its loss."""
        return f"{self.name}_loss" if self.name else "loss"

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that get a gradient."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def key(self, leaf: str) -> str:
        """What a leaf's optimizer slots are called in a `JobState`: two phases may hold one leaf."""
        return f"{self.name}:{leaf}" if self.name else leaf


@dataclass
class Built:
    """A job's live objects."""

    job: Job
    model: nn.Module
    phases: tuple[LivePhase, ...]
    data: Arrays
    validation: Arrays | None
    evaluate: Step
    manual: ManualStep | None = None
    """A training step that updates by itself."""

    @property
    def seed(self) -> int:
        return signed_seed(self.job.seed)


def model_or_factory(job: Job) -> Any:
    """What the job names, which may have to be imported."""
    return imported(job.model) if isinstance(job.model, str) else job.model


def build_model(job: Job, made: Any) -> nn.Module:
    """The model itself, or what its factory makes; for whoever is inside the job's seed."""
    if not isinstance(made, nn.Module):
        _check_complete(job, "a function of nothing that makes a model", made)
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


def build_optimizer(
    job: Job, made: Any, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None
) -> Optimizer:
    """The optimizer itself, or what its factory makes over these parameters (the model's, if none are given)."""
    if made is None:
        raise OptimizerError(
            says(job, "an optimizer", "None", "pass optimizer=partial(torch.optim.AdamW, lr=1e-3)")
        )
    if not isinstance(made, Optimizer):
        if not callable(made):
            raise OptimizerError(
                says(job, "an optimizer or a function of parameters", shown(made), "pass a factory")
            )
        _check_complete(
            job, "a function of parameters alone that makes an optimizer", made, model.parameters()
        )
        made = made(list(model.parameters() if parameters is None else parameters))
    if not isinstance(made, Optimizer):
        raise OptimizerError(
            says(job, "the factory to return a torch optimizer", type(made).__name__, "return the optimizer")
        )
    ours = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in ours for group in made.param_groups for p in group["params"])
    if foreign:
        raise OptimizerError(
            says(
                job,
                "an optimizer over this job's model's parameters",
                f"{foreign} parameters that are not the model's",
                "build the optimizer from the same model object, or pass a factory",
            )
        )
    return made


def build_timer(job: Job, scheduler: Any, optimizer: Optimizer) -> Timer | None:
    """The scheduler itself, or what its factory makes over the optimizer, and when it steps."""
    if scheduler is None:
        return None
    wish = scheduler if isinstance(scheduler, Schedule) else Schedule(scheduler)
    made = wish.scheduler
    if not isinstance(made, LRScheduler | ReduceLROnPlateau):
        if not callable(made):
            remedy = "pass a function of the optimizer: partial(StepLR, step_size=10)"
            raise OptimizerError(says(job, "a scheduler, or a function that makes one", shown(made), remedy))
        _check_complete(job, "a function of the optimizer alone that makes a scheduler", made, optimizer)
        made = made(optimizer)
    if not isinstance(made, LRScheduler | ReduceLROnPlateau) or made.optimizer is not optimizer:
        raise OptimizerError(
            says(
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
            says(job, "ReduceLROnPlateau to step by epoch", 'every="step"', "leave every out")
        )
    return Timer(made, every, wish.monitor)


_EXAMPLES = {
    "step_size": "10",
    "T_max": "10",
    "T_0": "10",
    "max_lr": "0.1",
    "total_steps": "100",
    "milestones": "[10, 20]",
}
"""Of arguments that schedulers of torch cannot do without."""


def _check_complete(job: Job, word: str, function: Any, *given: Any) -> None:
    """Whether a function can be called with what we give it alone; a class without its own arguments cannot."""
    wanted = missing(function, *given)
    if not wanted:
        return
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    filled = ", ".join(f"{one}={_EXAMPLES.get(one, '...')}" for one in wanted)
    error = OptimizerError if given else ModelError
    received = f"{name}, which also wants {', '.join(wanted)}"
    raise error(says(job, word, received, f"pass partial({name}, {filled})"))


def _check_monitor(job: Job, monitor: str | None) -> None:
    known = ["loss", *(job.metrics or {})]
    known += [f"val_{name}" for name in known] if job.validation_data is not None else []
    if monitor is not None and job.loss is not None and monitor not in known:
        raise OptimizerError(
            says(
                job,
                f"a monitor out of {', '.join(known)}",
                repr(monitor),
                meant(monitor, known) or "name one of these",
            )
        )


def build_step(job: Job) -> Step:
    """The job's objective in one form, in its own precision: scalars by name, with "loss" among them."""
    if job.step is not None:
        return in_precision(job, full_step(job, job.step))
    if job.loss is None:
        raise LossError(says(job, "loss= or step=", "neither", "pass loss=F.cross_entropy, say"))
    return in_precision(job, _loss_step(job, job.loss))


def in_precision(job: Job, objective: Step) -> Step:
    """The objective computed in the job's precision."""

    def step(model: nn.Module, batch: Any, place: Any) -> dict[str, torch.Tensor]:
        device = next((leaf.device.type for leaf in model.parameters()), "cpu")
        with computing_in(job.precision, device):
            return objective(model, batch, place)

    return step


def _loss_step(job: Job, loss: Callable[[Any, Any], Any]) -> Step:
    metrics = dict(job.metrics or {})

    def step(model: nn.Module, batch: Any, place: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        prediction = model(*x) if isinstance(x, tuple | list) else model(x)
        values = {name: metric(prediction, y) for name, metric in metrics.items()}
        return {
            "loss": scalar(job, "loss", loss(prediction, y)),
            **{k: scalar(job, k, v) for k, v in values.items()},
        }

    return step


def full_step(job: Job, function: Callable[..., Any]) -> Step:
    """A step of the user's own, which returns a loss or a dict with one in it."""

    def step(model: nn.Module, batch: Any, place: Any) -> dict[str, torch.Tensor]:
        return scalars(job, function(model, batch))

    return step


def scalars(job: Job, made: Any) -> dict[str, torch.Tensor]:
    """What a step returned, as scalars by name."""
    values = made if isinstance(made, dict) else {"loss": made}
    check_names(job, values)
    if "loss" not in values:
        raise LossError(
            says(job, 'step to return a loss or a dict with "loss"', ", ".join(values), 'add "loss"')
        )
    return {name: scalar(job, name, value) for name, value in values.items()}


def scalar(job: Job, name: str, value: Any) -> torch.Tensor:
    """A value that a step returned, checked."""
    if not isinstance(value, torch.Tensor):
        raise LossError(
            says(job, f"{name} to be a tensor", type(value).__name__, "return a tensor, not a number")
        )
    if value.numel() != 1:
        raise LossError(
            says(job, f"{name} to be a scalar", f"shape {tuple(value.shape)}", "reduce it, with .mean() say")
        )
    return value.reshape(())


def build_data(job: Job, data: Any, index: Any, word: str) -> Arrays:
    """The user's nest of arrays as tensors that share their memory, checked."""
    if isinstance(data, torch.utils.data.TensorDataset):
        data = data.tensors
    leaves, nest = _flattened(data)
    if not leaves:
        raise DataError(says(job, f"arrays as {word}", "none", "pass a tuple of arrays (x, y)"))
    if job.loss is not None and not (isinstance(data, tuple | list) and len(data) == 2):
        raise DataError(
            says(job, f"{word}=(x, y) beside loss=", type(data).__name__, "pass a pair, or use step=")
        )
    tensors = tuple(_tensor(job, leaf, word) for leaf in leaves)
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise DataError(says(job, f"arrays of one length as {word}", f"lengths {lengths}", "align x and y"))
    flat = type(data) is tuple and len(data) == len(leaves)
    arrays = Arrays(tensors, nest, make_index(job, index, lengths[0]), flat)
    if arrays.length == 0:
        raise DataError(
            says(job, f"at least one sample as {word}", "0", "pass more data, or leave the job out")
        )
    return arrays


def _flattened(data: Any) -> tuple[list[Any], Any]:
    """Leaves and nest; torch's own way takes longer, and leaves garbage in a cycle, for each of many jobs."""
    if type(data) is tuple and all(type(leaf) in _LEAVES for leaf in data):
        return list(data), _flat_nest(len(data))
    return pytree.tree_flatten(data)


_LEAVES = frozenset({torch.Tensor, np.ndarray})


@functools.cache
def _flat_nest(count: int) -> Any:
    return pytree.tree_structure((0,) * count)


def _tensor(job: Job, leaf: Any, word: str) -> torch.Tensor:
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf)
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        raise DataError(
            says(
                job,
                f"NumPy arrays or torch tensors as {word}",
                type(leaf).__name__,
                "convert it, with torch.as_tensor say",
            )
        )
    return leaf.detach()


def make_index(job: Job, index: Any, length: int) -> torch.Tensor | None:
    """The positions that a job reads, checked; None for all of them."""
    found = positions(index, length, job.name)
    return None if found is None else torch.from_numpy(found)


def says(job: Job, expected: str, received: str, remedy: str) -> str:
    """Our message, with the job it is about."""
    return f"Job {job.name!r}: " + sentence(expected, received, remedy)
