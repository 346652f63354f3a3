"""Random small nets, by their number: what machine code of whole steps is tried on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from carpool.job import Job, Schedule

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "elu": partial(nn.ELU, alpha=0.7),
    "leaky_relu": partial(nn.LeakyReLU, 0.1),
    "softplus": partial(nn.Softplus, beta=1.5),
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
    "selu": nn.SELU,
    "celu": partial(nn.CELU, alpha=1.3),
    "relu6": nn.ReLU6,
    "hardsigmoid": nn.Hardsigmoid,
    "logsigmoid": nn.LogSigmoid,
    "softsign": nn.Softsign,
    "prelu": nn.PReLU,
}
"""By name. Each is used somewhere in the first nets."""


def own_pointwise(prediction: Tensor, target: Tensor) -> Tensor:
    """A loss of the user's own."""
    apart = prediction - target
    return torch.log(torch.cosh(apart)).mean() + 0.1 * torch.where(apart > 0, apart, -2 * apart).mean()


def _nll(prediction: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(prediction, -1), target)


def _kl(prediction: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(prediction, -1), F.softmax(target, -1), reduction="batchmean")


def _weighted(prediction: Tensor, target: Tensor) -> Tensor:
    """With weights that are computed anew each time."""
    weight = torch.linspace(0.5, 1.5, prediction.shape[-1], dtype=prediction.dtype)
    return F.cross_entropy(prediction, target, weight=weight)


class Weighted:
    """Cross entropy with weights that it holds."""

    def __init__(self, classes: int, double: bool) -> None:
        self.weight = torch.linspace(0.5, 1.5, classes, dtype=torch.float64 if double else torch.float32)

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(prediction, target, weight=self.weight.to(prediction.dtype), ignore_index=0)


LABELLED: dict[str, Callable[..., Any]] = {
    "cross_entropy": F.cross_entropy,
    "cross_entropy_smooth": partial(F.cross_entropy, label_smoothing=0.1),
    "cross_entropy_ignore": partial(F.cross_entropy, ignore_index=1),
    "cross_entropy_sum": partial(F.cross_entropy, reduction="sum"),
    "cross_entropy_weight": _weighted,
    "nll": _nll,
}
VALUED: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": partial(F.smooth_l1_loss, beta=0.5),
    "huber": partial(F.huber_loss, delta=0.7),
    "kl_div": _kl,
    "own": own_pointwise,
}
BINARY: dict[str, Callable[..., Any]] = {
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "bce": lambda prediction, target: F.binary_cross_entropy(torch.sigmoid(prediction), target),
    "logistic": lambda prediction, target: F.softplus((1 - 2 * target) * prediction).mean(),
}
LOSSES = {**LABELLED, **VALUED, **BINARY, "cross_entropy_held": Weighted}

_SGD, _ADAM, _ADAMW, _RMS = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
_NADAM, _RADAM = torch.optim.NAdam, torch.optim.RAdam
OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "sgd": (_SGD, 0.05),
    "sgd_momentum": (partial(_SGD, momentum=0.9), 0.02),
    "sgd_nesterov": (partial(_SGD, momentum=0.8, nesterov=True, weight_decay=1e-2), 0.02),
    "sgd_dampened": (partial(_SGD, momentum=0.9, dampening=0.3, weight_decay=1e-3), 0.02),
    "sgd_maximize": (partial(_SGD, momentum=0.5, maximize=True), 1e-3),
    "adam": (_ADAM, 2e-3),
    "adam_l2": (partial(_ADAM, weight_decay=1e-2, betas=(0.8, 0.95), eps=1e-6), 2e-3),
    "amsgrad": (partial(_ADAM, amsgrad=True, betas=(0.3, 0.9)), 2e-3),
    "adam_maximize": (partial(_ADAM, maximize=True), 1e-3),
    "adamw": (partial(_ADAMW, weight_decay=0.1), 2e-3),
    "adamw_amsgrad": (partial(_ADAMW, amsgrad=True, weight_decay=0.1), 2e-3),
    "nadam": (partial(_NADAM, weight_decay=1e-2, momentum_decay=0.02), 2e-3),
    "nadam_decoupled": (partial(_NADAM, weight_decay=0.1, decoupled_weight_decay=True), 2e-3),
    "radam": (partial(_RADAM, weight_decay=1e-2, betas=(0.5, 0.7)), 2e-3),
    "radam_decoupled": (partial(_RADAM, weight_decay=0.1, decoupled_weight_decay=True), 2e-3),
    "adamax": (partial(torch.optim.Adamax, weight_decay=1e-2), 2e-3),
    "rmsprop": (_RMS, 1e-3),
    "rmsprop_momentum": (partial(_RMS, momentum=0.8, alpha=0.9, weight_decay=1e-2), 1e-3),
    "rmsprop_centered": (partial(_RMS, centered=True, momentum=0.5, alpha=0.95, eps=1e-4), 1e-3),
    "adagrad": (partial(torch.optim.Adagrad, lr_decay=0.01, initial_accumulator_value=0.1), 2e-2),
    "adadelta": (partial(torch.optim.Adadelta, rho=0.8, weight_decay=1e-2), 0.5),
}


class Grouped:
    """An optimizer of two parameter groups: the second decays nothing and learns at half the rate."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        rest = [p for p in parameters if p.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}] if matrices else []
        if rest:
            groups.append({"params": rest, "weight_decay": 0.0, "lr": lr / 2})
        return self._make(groups, lr=lr)


class Chain(nn.Module):
    """What comes in (numbers, words, or both) through a chain of layers. One layer may be used twice."""

    def __init__(
        self, embed: nn.Module | None, layers: list[nn.Module], twice: int | None, pair: bool
    ) -> None:
        super().__init__()
        self.embed, self.layers, self.twice, self.pair = embed, nn.ModuleList(layers), twice, pair

    def forward(self, *given: Any) -> Tensor:
        x, *rest = given
        if self.embed is not None:
            words = self.embed(x if not rest else rest[0])
            words = words.mean(1) if words.dim() == 3 else words
            x = torch.cat([x, words], 1) if rest else words
        elif rest:
            x = torch.cat([x * 0.5, torch.tanh(rest[0])], -1)
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == self.twice:
                x = layer(x) + x
        return x


class TiedChain(nn.Module):
    """An embedding whose matrix is also the output's."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(words, width), nn.Linear(width, width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(self.embed(x).mean(1))))


def accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.argmax(-1) == target).to(prediction).mean()


def apart(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs().amax()


def share_above(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction > target.mean()).to(prediction).mean()


@dataclass(frozen=True)
class Net:
    """Jobs of one structure, and what they are made of, in words."""

    number: int
    words: tuple[str, ...]
    jobs: tuple[Job, ...]
    double: bool

    def __str__(self) -> str:
        return f"{self.number}: {' '.join(self.words)}"


def net(number: int, members: int = 2, double: bool | None = None) -> Net:
    """The net of this number. Every eighth is of float64, unless that is said."""
    return _Draw(number, number % 8 == 7 if double is None else double).net(members)


class _Draw:
    def __init__(self, number: int, double: bool) -> None:
        self.number, self.double = number, double
        self.random = random.Random(number)
        self.words: list[str] = []

    def net(self, members: int) -> Net:
        self.normed = self.chance(0.3)
        self.input = self.random.choices(("vector", "words", "both", "pair", "tied"), (6, 2, 1, 1, 1))[0]
        self.say(self.input)
        self.hidden = self.random.randint(0, 3)
        self.batch = self.random.choice([1, 2, 3, 5, 8, 16, 31, 32, 33, 64, 100, 128, 257])
        if self.normed:
            self.batch = max(self.batch, 16)
        self.features, self.vocabulary = self.width(), self.random.randint(2, 50)
        self.samples = self.sampled()
        loss, target, metrics = self.objective()
        model = self.model()
        data = self.data(target)
        optimizer, rate = self.optimizer()
        options = self.options(metrics)
        jobs = tuple(
            Job(
                model,
                data,
                loss=loss,
                optimizer=partial(optimizer, lr=rate * (1 + member / 2)),
                batch_size=self.batch,
                epochs=self.epochs,
                seed=1000 * self.number + member,
                name=f"{self.number}.{member}",
                **options,
            )
            for member in range(members)
        )
        return Net(self.number, tuple(self.words), jobs, self.double)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def say(self, *words: Any) -> None:
        self.words += map(str, words)

    def width(self) -> int:
        return self.random.randint(1, self.random.choice([4, 12, 40, 100, 300]))

    def sampled(self) -> int:
        """Whole batches and, often, a rest. A norm of one or two samples is nothing but rounding."""
        rest = self.random.randint(8 if self.normed else 1, self.batch) if self.chance(0.5) else 0
        rest = 0 if rest >= self.batch else rest
        whole = self.random.randint(2, 4)
        self.epochs = self.random.randint(1, 2)
        self.say(f"{whole}x{self.batch}+{rest}", f"{self.epochs}ep")
        return whole * self.batch + rest

    def objective(self) -> tuple[Any, str, dict[str, Any]]:
        name = self.random.choice(sorted(LOSSES))
        if self.input == "tied":
            name = self.random.choice(sorted(LABELLED))
        self.say(name)
        self.outputs = self.random.randint(2, 17)
        if name == "cross_entropy_held":
            return Weighted(self.outputs, self.double), "labels", {}
        if name in LABELLED:
            metrics = {"accuracy": accuracy} if self.chance(0.4) else {}
            return LOSSES[name], "labels", metrics
        metrics = {"apart": apart, "above": share_above} if self.chance(0.3) else {}
        if name != "kl_div" and self.chance(0.3):
            self.outputs = 1
        return LOSSES[name], "truths" if name in BINARY else "values", metrics

    def data(self, target: str) -> Any:
        made = torch.Generator().manual_seed(self.number)
        real = torch.float64 if self.double else torch.float32
        n = self.samples
        x = torch.randn(n, self.features, generator=made, dtype=torch.float64).to(real)
        words = torch.randint(0, self.vocabulary, (n, 3), generator=made)
        second = torch.randn(n, self.second, generator=made, dtype=torch.float64).to(real)
        inputs = {
            "vector": (x,), "words": (words,), "both": (x, words), "pair": (x, second), "tied": (words,),
        }[self.input]  # fmt: skip
        if target == "labels":
            classes = self.vocabulary if self.input == "tied" else self.outputs
            y = torch.randint(0, classes, (n,), generator=made)
        else:
            y = torch.randn(n, self.outputs, generator=made, dtype=torch.float64).to(real)
            y = (y > 0).to(real) if target == "truths" else y
        return (*inputs, y) if len(inputs) == 1 else (inputs, y)

    def model(self) -> Callable[[], nn.Module]:
        """A factory. What is random of the structure is drawn here and now."""
        self.second = self.random.randint(1, 9)
        if self.input == "tied":
            width = self.random.randint(2, 40)
            return _Make(partial(TiedChain, self.vocabulary, width), self.double, None)
        embedded = self.random.randint(1, 20)
        embed = partial(nn.Embedding, self.vocabulary, embedded, padding_idx=0 if self.chance(0.2) else None)
        size = {
            "vector": self.features, "words": embedded, "both": self.features + embedded,
            "pair": self.features + self.second,
        }[self.input]  # fmt: skip
        layers: list[Callable[[], nn.Module]] = []
        sizes = [size, *(self.width() for _ in range(self.hidden)), self.outputs]
        self.say("-".join(map(str, sizes)))
        for inner, outer in pairwise(sizes[:-1]):
            layers += self.block(inner, outer)
        layers.append(partial(nn.Linear, sizes[-2], sizes[-1], bias=self.chance(0.9)))
        twice = len(layers) - 1 if sizes[-1] == sizes[-2] and self.chance(0.5) else None
        has_words = self.input in ("words", "both")
        frozen = "layers.0" if self.hidden and self.chance(0.15) else None
        if frozen:
            self.say("frozen")
        return _Make(
            partial(_chain, embed if has_words else None, layers, twice, self.input == "pair"),
            self.double,
            frozen,
        )

    def block(self, inner: int, outer: int) -> list[Callable[[], nn.Module]]:
        activation = self.random.choice(sorted(ACTIVATIONS))
        self.say(activation)
        norm = (
            self.random.choice(["layer", "batch", "batch_plain", "group"])
            if self.normed and outer > 3
            else ""
        )
        made: list[Callable[[], nn.Module]] = [
            partial(nn.Linear, inner, outer, bias=not norm.startswith("batch"))
        ]
        if norm:
            self.say(norm)
        if norm == "layer":
            made.append(partial(nn.LayerNorm, outer))
        elif norm == "batch":
            made.append(partial(nn.BatchNorm1d, outer, momentum=self.random.choice([0.1, 0.3])))
        elif norm == "batch_plain":
            made.append(partial(nn.BatchNorm1d, outer, affine=False, track_running_stats=self.chance(0.5)))
        elif norm == "group" and outer % 2 == 0 and outer > 15:
            made.append(partial(nn.GroupNorm, 2, outer))
        made.append(ACTIVATIONS[activation])
        if self.chance(0.25):
            share = self.random.choice([0.1, 0.5])
            made.append(partial(self.random.choice([nn.Dropout, nn.Dropout, nn.AlphaDropout]), share))
            self.say("dropout")
        return made

    def optimizer(self) -> tuple[Callable[..., Any], float]:
        name = self.random.choice(sorted(OPTIMIZERS))
        self.say(name)
        make, rate = OPTIMIZERS[name]
        if self.chance(0.25):
            self.say("groups")
            return Grouped(make), rate
        return make, rate

    def options(self, metrics: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {"metrics": metrics} if metrics else {}
        if self.chance(0.25):
            made["clip_norm"] = self.random.choice([0.1, 1.0, 100.0])
        if self.chance(0.2):
            made["accumulate"] = self.random.choice([2, 3])
        if self.chance(0.3):
            made["scheduler"] = self.random.choice(
                [
                    Schedule(partial(schedules.CosineAnnealingLR, T_max=7), every="step"),
                    partial(schedules.ExponentialLR, gamma=0.8),
                    partial(schedules.OneCycleLR, max_lr=1e-2, total_steps=50, cycle_momentum=False),
                ]
            )
        made["shuffle"] = self.chance(0.8)
        self.say(*(word for word in made if word != "shuffle"))
        return made


class _Make:
    """A factory of a model, in a chosen precision."""

    def __init__(self, make: Callable[[], nn.Module], double: bool, frozen: str | None) -> None:
        self._make, self._double, self._frozen = make, double, frozen

    def __call__(self) -> nn.Module:
        made = self._make()
        if self._frozen is not None:
            made.get_submodule(self._frozen).requires_grad_(False)
        return made.double() if self._double else made


def _chain(
    embed: Callable[[], nn.Module] | None,
    layers: list[Callable[[], nn.Module]],
    twice: int | None,
    pair: bool,
) -> nn.Module:
    return Chain(embed() if embed else None, [make() for make in layers], twice, pair)
