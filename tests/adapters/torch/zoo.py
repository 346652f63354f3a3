"""The torch zoo of the conformance suite: models, optimizers, schedulers, and the plain loop they are held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import ReduceLROnPlateau

import carpool
from carpool.job import Job, Schedule
from carpool.result import Result
from carpool.testing import Reference, Variant

SAMPLES, BATCH = 60, 16


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        h = F.gelu(self.a(x))
        return self.out(h + torch.tanh(self.b(h)))


class Tied(nn.Module):
    """A tied embedding and output, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.out = nn.Linear(8, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x).mean(1)))


class Attention(nn.Module):
    """A transformer block with attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.place = nn.Parameter(torch.randn(5, 8) * 0.02)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 7)
        self.qkv = nn.Linear(
            8, 24, bias=False
        )  # a bias of keys has no gradient: optimizers would follow its rounding

    def forward(self, x):
        y = self.embed(x) + self.place
        q, k, v = self.qkv(self.norm(y)).chunk(3, dim=-1)
        y = y + torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1) @ v
        return self.out(y.mean(1))


class Idle(nn.Module):
    """A parameter that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


class Replaced(nn.Module):
    """A buffer that is replaced in the forward pass, not changed in place."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return self.layer(x - self.seen)


class Branching(nn.Module):
    """An `if` on a tensor: no trace can follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if y.mean() > 0 else y


class Noisy(nn.Module):
    """Random numbers drawn by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x):
        h = torch.relu(self.a(x))
        h = h + 0.1 * torch.randn_like(h) + 0.05 * torch.rand(10, dtype=h.dtype, device=h.device)
        return self.b(h * torch.bernoulli(torch.full_like(h, 0.8)))


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    net[0].requires_grad_(False)
    return net


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.SiLU(), nn.Linear(12, 3))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def conv_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def conv_1d() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def conv_transposed() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.ConvTranspose1d(
            1, 2, 3, bias=False
        ),  # the norm takes a bias out again: its gradient would be rounding
        nn.InstanceNorm1d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def recurrent_cell() -> nn.Module:
    return Unrolled()


class Unrolled(nn.Module):
    """A recurrent net written as a loop over cells."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(7, 6), nn.Linear(14, 8), nn.Linear(8, 7)

    def forward(self, x):
        h = torch.zeros(len(x), 8, dtype=self.out.weight.dtype, device=x.device)
        for step in self.embed(x).unbind(1):
            h = torch.tanh(self.cell(torch.cat([step, h], 1)))
        return self.out(h)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3), nn.AlphaDropout(0.1))


def dropout_2d() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def built_conv() -> nn.Module:
    net = conv()
    with torch.no_grad():
        net(torch.zeros(2, 1, 8, 8))
    return net


@cache
def tables(double: bool) -> dict[str, Any]:
    """The data: the same objects for equal arguments, so that members share them."""
    rng = np.random.default_rng(0)
    real = np.float64 if double else np.float32
    labels = torch.from_numpy(rng.integers(0, 3, SAMPLES))
    return {
        "vector": (torch.from_numpy(rng.normal(size=(SAMPLES, 6)).astype(real)), labels),
        "image": (torch.from_numpy(rng.normal(size=(SAMPLES, 1, 8, 8)).astype(real)), labels),
        "tokens": (
            torch.from_numpy(rng.integers(0, 7, (SAMPLES, 5))),
            torch.from_numpy(rng.integers(0, 7, SAMPLES)),
        ),
    }


def weighted_step(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """A full step of one's own, with a metric."""
    x, y = batch["x"], batch["y"]
    logits = model(x)
    return {
        "loss": F.cross_entropy(logits, y) + 1e-3 * logits.square().mean(),
        "size": logits.detach().square().mean(),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (mlp, "vector"),
    "residual": (Residual, "vector"),
    "batch_norm": (batch_norm, "vector"),
    "layer_norm": (layer_norm, "vector"),
    "conv": (built_conv, "image"),
    "conv_norm": (conv_norm, "image"),
    "conv_1d": (conv_1d, "vector"),
    "conv_transposed": (conv_transposed, "vector"),
    "tied": (Tied, "tokens"),
    "attention": (Attention, "tokens"),
    "unrolled": (Unrolled, "tokens"),
    "frozen": (frozen, "vector"),
    "idle": (Idle, "vector"),
    "replaced_buffer": (Replaced, "vector"),
    "own_step": (mlp, "vector"),
    "branching": (Branching, "vector"),
    "dropout": (dropout, "vector"),
    "dropout_2d": (dropout_2d, "image"),
    "noisy": (Noisy, "vector"),
}
RANDOM = ("dropout", "dropout_2d", "noisy")
FUSES = tuple(name for name in MODELS if name != "branching")


def two_groups(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}]
    if rest:
        groups.append({"params": rest, "weight_decay": 0.0, "lr": lr / 2})
    return torch.optim.AdamW(groups, lr=lr)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "sgd": (torch.optim.SGD, 0.05),
    "sgd_momentum": (partial(torch.optim.SGD, momentum=0.9), 0.02),
    "sgd_nesterov": (partial(torch.optim.SGD, momentum=0.8, nesterov=True, weight_decay=1e-2), 0.02),
    "sgd_dampened": (partial(torch.optim.SGD, momentum=0.9, dampening=0.3), 0.02),
    "adam": (torch.optim.Adam, 2e-3),
    "adam_l2": (partial(torch.optim.Adam, weight_decay=1e-2, betas=(0.8, 0.95), eps=1e-6), 2e-3),
    "two_groups": (two_groups, 2e-3),
    "amsgrad": (partial(torch.optim.Adam, amsgrad=True, betas=(0.8, 0.9)), 2e-3),
    "adamw_amsgrad": (partial(torch.optim.AdamW, amsgrad=True, weight_decay=0.1), 2e-3),
    "nadam": (partial(torch.optim.NAdam, weight_decay=1e-2, momentum_decay=0.02), 2e-3),
    "nadam_decoupled": (
        partial(torch.optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True, betas=(0.8, 0.95)),
        2e-3,
    ),
    "radam": (partial(torch.optim.RAdam, weight_decay=1e-2), 2e-3),
    "radam_decoupled": (
        partial(torch.optim.RAdam, weight_decay=0.1, decoupled_weight_decay=True, betas=(0.8, 0.95)),
        2e-3,
    ),
    "adamax": (partial(torch.optim.Adamax, weight_decay=1e-2), 2e-3),
    "rmsprop": (torch.optim.RMSprop, 1e-3),
    "rmsprop_momentum": (partial(torch.optim.RMSprop, momentum=0.8, alpha=0.9, weight_decay=1e-2), 1e-3),
    "rmsprop_centered": (
        partial(torch.optim.RMSprop, centered=True, momentum=0.5, alpha=0.95, eps=1e-6),
        1e-3,
    ),
    "adagrad": (
        partial(torch.optim.Adagrad, lr_decay=0.01, initial_accumulator_value=0.1, weight_decay=1e-2),
        2e-2,
    ),
    "adadelta": (partial(torch.optim.Adadelta, rho=0.8, weight_decay=1e-2), 0.5),
    "adamw": (partial(torch.optim.AdamW, weight_decay=0.1), 2e-3),
}


def _warm_then_cosine(optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    return schedules.SequentialLR(optimizer, [warm, schedules.CosineAnnealingLR(optimizer, 20)], [3])


SCHEDULERS: dict[str, Any] = {
    "constant": None,
    "step": partial(schedules.StepLR, step_size=3, gamma=0.5),
    "multi_step": partial(schedules.MultiStepLR, milestones=[2, 5]),
    "exponential": partial(schedules.ExponentialLR, gamma=0.9),
    "cosine_by_step": Schedule(partial(schedules.CosineAnnealingLR, T_max=50), every="step"),
    "warm_restarts": partial(schedules.CosineAnnealingWarmRestarts, T_0=4),
    "one_cycle": partial(schedules.OneCycleLR, max_lr=0.01, total_steps=200, cycle_momentum=False),
    "cyclic": partial(schedules.CyclicLR, base_lr=1e-4, max_lr=5e-3, step_size_up=7, cycle_momentum=False),
    "lambda": partial(schedules.LambdaLR, lr_lambda=lambda epoch: 0.95**epoch),
    "polynomial": partial(schedules.PolynomialLR, total_iters=10),
    "sequential": _warm_then_cosine,
    "plateau": partial(ReduceLROnPlateau, patience=1, threshold=0.05, factor=0.5),
}


def make_job(model: str, optimizer: str, scheduler: str, variant: Variant, double: bool) -> Job:
    """A job of the zoo."""
    make, table = MODELS[model]
    kind, rate = OPTIMIZERS[optimizer]
    x, y = tables(double)[table]
    own = model == "own_step"
    return Job(
        _Make(make, double),
        data={"x": x, "y": y} if own else (x, y),
        loss=None if own else F.cross_entropy,
        step=weighted_step if own else None,
        optimizer=partial(kind, lr=rate * variant.scale),
        scheduler=SCHEDULERS[scheduler],
        batch_size=BATCH,
        epochs=variant.epochs,
        seed=variant.seed,
        **variant.options,
    )


class _Make:
    """A factory in a chosen precision."""

    def __init__(self, make: Callable[[], nn.Module], double: bool) -> None:
        self._make, self._double = make, double

    def __call__(self) -> nn.Module:
        return self._make().double() if self._double else self._make()


# The plain loop


def plain_objects(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Model, optimizer and scheduler made the way anyone would."""
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        model = job.model()
    optimizer = job.optimizer(list(model.parameters()))
    wish = job.scheduler.scheduler if isinstance(job.scheduler, Schedule) else job.scheduler
    return model, optimizer, wish(optimizer) if wish else None


def objective(job: Job, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if job.loss is None:
        return weighted_step(model, {"x": x, "y": y})["loss"]
    return job.loss(model(x), y)


def plain_loop(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> Reference:
    """Trains by hand. Nothing of carpool is used but the public order of batches."""
    by_step = isinstance(job.scheduler, Schedule) or isinstance(
        scheduler, schedules.OneCycleLR | schedules.CyclicLR
    )
    history = []
    tensors = list(job.data.values()) if isinstance(job.data, dict) else list(job.data)
    view = np.arange(len(tensors[0])) if job.index is None else np.asarray(job.index)
    for epoch in range(job.epochs):
        order = carpool.batch_order(job.seed, epoch, len(view)) if job.shuffle else np.arange(len(view))
        total = 0.0
        for index in torch.from_numpy(view[order]).split(job.batch_size):
            x, y = (tensor[index] for tensor in tensors)
            optimizer.zero_grad()
            loss = objective(job, model, x, y)
            loss.backward()
            if job.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            total += loss.item() * len(index)
            if scheduler is not None and by_step:
                scheduler.step()  # type: ignore[call-arg]  # ReduceLROnPlateau never steps by batch
        history.append(total / len(view))
        if scheduler is not None and not by_step:
            scheduler.step(*([history[-1]] if isinstance(scheduler, ReduceLROnPlateau) else []))
    return shown(model, optimizer, history)


def shown(model: nn.Module, optimizer: torch.optim.Optimizer, history: Any) -> Reference:
    """What live objects hold, as arrays."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots = {
        names[id(p)]: {
            slot: value.cpu().numpy() for slot, value in state.items() if isinstance(value, torch.Tensor)
        }
        for p, state in optimizer.state.items()
        if state
    }
    leaves = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Reference(
        weights={name: leaf.detach().cpu().numpy() for name, leaf in leaves.items()},
        slots={name: own for name, own in slots.items() if own},
        rates=[float(group["lr"]) for group in optimizer.param_groups],
        history=list(history),
    )


class TorchZoo:
    """The torch half of the suite: mixed into `AdapterConformance`."""

    models = tuple(MODELS)
    random_models = RANDOM
    fuses = FUSES
    optimizers = tuple(OPTIMIZERS)
    schedulers = tuple(SCHEDULERS)

    def job(self, model: str, optimizer: str, scheduler: str, variant: Variant, double: bool = True) -> Job:
        return make_job(model, optimizer, scheduler, variant, double)

    def reference(self, job: Job) -> Reference:
        return plain_loop(job, *plain_objects(job))

    def left(self, result: Result) -> Reference:
        return shown(result.model, result.optimizer, result.history["loss"])

    def continued(self, job: Job, result: Result) -> Job:
        return replace(job, model=result.model, optimizer=result.optimizer, scheduler=result.scheduler)

    def reference_continued(self, job: Job) -> Reference:
        objects = plain_objects(job)
        plain_loop(job, *objects)
        return plain_loop(job, *objects)
