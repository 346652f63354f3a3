"""The demo: small classifiers of scikit-learn's digits trained together, and beside them the same in a plain loop.

It is a user's program that comes with the package: it imports torch and scikit-learn when it runs, and uses of
carpool what everyone can. The plain loop has only the order of the batches from carpool, so that the trained weights
can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import carpool
from carpool.errors import OptionError, sentence
from carpool.events import Emit, Event, GroupCompiled
from carpool.planning.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor, nn

EPOCHS = 200
BATCH_SIZE = 32
AXES = {"lr": (1e-3, 2e-3, 5e-3, 1e-2), "hidden": (32, 64), "depth": (1, 2)}
_VALIDATION = 360
_COMPARED_EPOCHS = 2  # 90 steps: the promise about weights is stated for 100


@dataclass(frozen=True)
class Digits:
    """Standardised 8 x 8 images and what they show, split once and for all."""

    x: Tensor
    y: Tensor
    validation_x: Tensor
    validation_y: Tensor

    def to(self, device: str) -> Digits:
        return Digits(
            *(tensor.to(device) for tensor in (self.x, self.y, self.validation_x, self.validation_y))
        )


@dataclass(frozen=True)
class Together:
    """All jobs trained by carpool; `seconds` has `compile_s` inside."""

    results: carpool.Results
    seconds: float
    compile_s: float


@dataclass(frozen=True)
class Alone:
    """One job trained in the plain loop."""

    model: nn.Module
    val_accuracy: float
    seconds: float


@dataclass(frozen=True)
class Report:
    """What the demo measured. `together_s` has `compile_s` inside, so `speedup` has it too.

    `max_weight_difference` is between carpool and the plain loop after `compared_steps` steps; the `final_` ones are
    after all epochs, when float32's rounding has had thousands of steps to grow.
    """

    device: str
    jobs: int
    groups: int
    epochs: int
    together_s: float
    compile_s: float
    alone_s: float
    alone_sampled_jobs: int
    alone_sampled_s: float
    speedup: float
    compared_steps: int
    max_weight_difference: float
    max_weight: float
    final_weight_difference: float
    final_accuracy_difference: float
    best: Mapping[str, Any]

    def describe(self) -> str:
        """The comparison in words."""
        return "\n".join(
            [
                f"together:   {self.together_s:.1f} s for {self.jobs} jobs, {self.compile_s:.1f} s of it preparing steps",
                f"one by one: {self.alone_s:.1f} s, scaled from {self.alone_sampled_jobs} jobs that were trained alone,"
                f" all {self.epochs} epochs of them, in a plain PyTorch loop ({self.alone_sampled_s:.1f} s)",
                f"speed-up:   {self.speedup:.1f}",
                f"largest weight difference between the two after {self.compared_steps} steps:"
                f" {self.max_weight_difference:.1e} (promised: at most {1e-4 * self.max_weight:.1e})",
                f"after all epochs: {self.final_weight_difference:.1e} in weights (float32 rounding grows step by step),"
                f" {self.final_accuracy_difference:.4f} in validation accuracy",
            ]
        )


def run(
    jobs: int = 64,
    epochs: int = EPOCHS,
    device: str = "auto",
    *,
    say: Callable[[str], None] = print,
    reporters: Sequence[Emit] = (),
) -> Report:
    """Trains the jobs together, one of each structure alone, and compares."""
    say(f"{jobs} small classifiers of scikit-learn's digits, {epochs} epochs each; loading PyTorch ...")
    data = digits()
    wanted = make_jobs(data, jobs, epochs)
    plan = carpool.plan(wanted, device=device)
    say(plan.explain() + "\n")
    together = train_together(wanted, device, reporters)
    say(together.results.table(sort="val_accuracy", top=10) + "\n")
    samples = _one_of_each(wanted)
    say(f"Now {len(samples)} of them alone, in a plain PyTorch loop.\n")
    # The short comparison comes first: torch's first optimizer step imports for a second, which is not to be timed.
    early = _early_difference(data, jobs, samples, min(_COMPARED_EPOCHS, epochs), plan.device)
    alone = {str(job.name): train_alone(data.to(plan.device), job.config or {}, epochs) for job in samples}
    return _report(together, alone, early, plan, epochs)


def digits() -> Digits:
    """scikit-learn's own digits: 1,437 to train on, 360 to validate."""
    try:
        import torch
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise OptionError(
            sentence("torch and scikit-learn for the demo", str(error), "pip install 'carpool[demo]'")
        ) from error
    images, labels = load_digits(return_X_y=True)
    shuffled = torch.from_numpy(carpool.batch_order(seed=0, epoch=0, length=len(images)))
    x, y = torch.from_numpy(images)[shuffled].float(), torch.from_numpy(labels)[shuffled].long()
    seen = x[:-_VALIDATION]
    x = (x - seen.mean(0)) / seen.std(0).clamp(min=1.0)
    return Digits(x[:-_VALIDATION], y[:-_VALIDATION], x[-_VALIDATION:], y[-_VALIDATION:])


def network(hidden: int, depth: int) -> nn.Module:
    """A classifier with `depth` hidden layers."""
    from torch import nn

    widths = [64, *[hidden] * depth]
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


def accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    """The share of digits that were recognised."""
    return (prediction.argmax(-1) == target).float().mean()


def make_jobs(data: Digits, count: int, epochs: int) -> Sequence[carpool.Job]:
    """So many jobs: learning rates, widths and depths for one seed after another."""
    import torch

    def job(seed: int, lr: float, hidden: int, depth: int) -> carpool.Job:
        return carpool.Job(
            partial(network, hidden, depth),
            data=(data.x, data.y),
            validation_data=(data.validation_x, data.validation_y),
            loss=torch.nn.functional.cross_entropy,
            metrics={"accuracy": accuracy},
            optimizer=partial(torch.optim.AdamW, lr=lr),
            batch_size=BATCH_SIZE,
            epochs=epochs,
            seed=seed,
        )

    return carpool.grid(job, seed=range(count), **AXES)[:count]


def train_together(jobs: Sequence[carpool.Job], device: str, reporters: Sequence[Emit] = ()) -> Together:
    """The jobs trained by carpool, timed with planning and compiling inside."""
    prepared = _Prepared()
    started = time.perf_counter()
    results = carpool.train(jobs, device=device, reporters=[*reporters, prepared])
    return Together(results, time.perf_counter() - started, prepared.seconds)


class _Prepared:
    """Adds up what making steps ready takes, and hears of nothing else: whoever hears of each epoch has each told."""

    hears: frozenset[type[Event]] = frozenset({GroupCompiled})

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, event: Event) -> None:
        assert isinstance(event, GroupCompiled)
        self.seconds += event.seconds


def train_alone(data: Digits, config: Mapping[str, Any], epochs: int) -> Alone:
    """One job the way it is written without carpool; it follows training loss and validation, as people do."""
    import torch
    from torch.nn.functional import cross_entropy

    started = time.perf_counter()
    torch.manual_seed(config["seed"])
    model = network(config["hidden"], config["depth"]).to(data.x.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    correct = torch.zeros((), device=data.x.device)
    for epoch in range(epochs):
        order = torch.from_numpy(carpool.batch_order(config["seed"], epoch, len(data.x))).to(data.x.device)
        total = torch.zeros((), device=data.x.device)
        for rows in order.split(BATCH_SIZE):
            optimizer.zero_grad()
            loss = cross_entropy(model(data.x[rows]), data.y[rows])
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
        with torch.no_grad():
            prediction = model(data.validation_x)
            cross_entropy(prediction, data.validation_y)
            correct = accuracy(prediction, data.validation_y)
    return Alone(model, correct.item(), time.perf_counter() - started)


def _one_of_each(jobs: Sequence[carpool.Job]) -> list[carpool.Job]:
    first: dict[tuple[int, int], carpool.Job] = {}
    for job in jobs:
        first.setdefault(_structure(job.config or {}), job)
    return list(first.values())


def _structure(config: Mapping[str, Any]) -> tuple[int, int]:
    return config["hidden"], config["depth"]


def _early_difference(
    data: Digits, count: int, samples: Sequence[carpool.Job], epochs: int, device: str
) -> tuple[float, float]:
    """The largest weight difference and the largest weight after a few epochs, between carpool and the plain loop."""
    results = train_together(make_jobs(data, count, epochs), device).results
    pairs = [
        (results[str(job.name)].model, train_alone(data.to(device), job.config or {}, epochs).model)
        for job in samples
    ]
    largest = max(value.abs().max().item() for _, model in pairs for value in model.parameters())
    return max(_difference(ours, plain) for ours, plain in pairs), largest


def _difference(ours: nn.Module, plain: nn.Module) -> float:
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in pairs)


def _report(
    together: Together, alone: Mapping[str, Alone], early: tuple[float, float], plan: Plan, epochs: int
) -> Report:
    results = together.results
    seconds = {_structure(results[name].config): one.seconds for name, one in alone.items()}
    alone_s = sum(seconds[_structure(result.config)] for result in results)
    best = results.best("val_accuracy")
    return Report(
        device=plan.device,
        jobs=len(results),
        groups=len(plan.groups),
        epochs=epochs,
        together_s=together.seconds,
        compile_s=together.compile_s,
        alone_s=alone_s,
        alone_sampled_jobs=len(alone),
        alone_sampled_s=sum(one.seconds for one in alone.values()),
        speedup=alone_s / together.seconds,
        compared_steps=results[0].steps // epochs * min(_COMPARED_EPOCHS, epochs),
        max_weight_difference=early[0],
        max_weight=early[1],
        final_weight_difference=max(
            _difference(results[name].model, one.model) for name, one in alone.items()
        ),
        final_accuracy_difference=max(
            abs(results[name].last("val_accuracy") - one.val_accuracy) for name, one in alone.items()
        ),
        best={"name": best.name, "val_accuracy": best.last("val_accuracy")},
    )
