"""What `carpool bench` compares: small networks, and an eager loop, torch.func's vmap compiled, and `carpool.train`.

Like the demo it is a user's program that comes with the package: it imports torch when it runs, and uses of carpool what
everyone can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import carpool
from carpool.events import Event, GroupAdvanced

if TYPE_CHECKING:
    from torch import Tensor, nn

SAMPLES, BATCH_SIZE, CLASSES = 1024, 32, 10


@dataclass(frozen=True)
class Structure:
    """A small network, the shape of its inputs, and for how many epochs it is trained."""

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    epochs: int


class Ours:
    """A whole call of `carpool.train`; of the first, how long its first steps took to be on their way."""

    def __init__(self, jobs: Callable[[], Sequence[carpool.Job]], device: str) -> None:
        self._jobs, self._device = jobs, device
        self._started = 0.0
        self.first_step_s: float | None = None

    def __call__(self) -> int:
        self._started = time.perf_counter()
        results = carpool.train(self._jobs(), device=self._device, reporters=[self._heard])
        return sum(result.steps for result in results)

    def _heard(self, event: Event) -> None:
        if self.first_step_s is None and isinstance(event, GroupAdvanced):
            self.first_step_s = time.perf_counter() - self._started


def eager(structure: Structure, x: Tensor, y: Tensor, models: int) -> int:
    """Models one after another, as they are written without carpool."""
    import torch
    from torch.nn.functional import cross_entropy

    for seed in range(models):
        torch.manual_seed(seed)
        model = structure.make().to(x.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(structure.epochs):
            total = torch.zeros((), device=x.device)
            for rows in torch.randperm(len(x), device=x.device).split(BATCH_SIZE):
                optimizer.zero_grad()
                loss = cross_entropy(model(x[rows]), y[rows])
                loss.backward()
                optimizer.step()
                total += loss.detach()
    _wait(x)
    return models * structure.epochs * (len(x) // BATCH_SIZE)


class Vmapped:
    """All models through vmap(grad), with Adam by hand, in one compiled step; a call is an epoch."""

    def __init__(self, structure: Structure, x: Tensor, y: Tensor, models: int) -> None:
        self._structure, self._x, self._y, self._models = structure, x, y, models
        self._step: Callable[[Tensor], Tensor] | None = None

    def __call__(self) -> int:
        import torch

        step = self._step = self._step or torch.compile(self._made(), dynamic=False)
        order = torch.rand(self._models, len(self._x), device=self._x.device).argsort(1)
        total = torch.zeros(self._models, device=self._x.device)
        for rows in order.split(BATCH_SIZE, dim=1):
            total += step(rows)
        _wait(self._x)
        return self._models * (len(self._x) // BATCH_SIZE)

    def _made(self) -> Callable[[Tensor], Tensor]:
        import torch
        from torch.func import functional_call, grad_and_value, stack_module_state, vmap
        from torch.nn.functional import cross_entropy

        models = [self._structure.make() for _ in range(self._models)]
        template = self._structure.make().to("meta")
        weights = {
            name: leaf.detach().to(self._x.device, copy=True)
            for name, leaf in stack_module_state(models)[0].items()
        }
        means, squares = ({name: torch.zeros_like(leaf) for name, leaf in weights.items()} for _ in range(2))
        count = torch.zeros((), device=self._x.device)

        def objective(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(functional_call(template, own, (x,)), y)

        def step(rows: Tensor) -> Tensor:
            grads, losses = vmap(grad_and_value(objective))(weights, self._x[rows], self._y[rows])
            count.add_(1)
            for name, weight in weights.items():
                means[name].lerp_(grads[name], 0.1)
                squares[name].mul_(0.999).addcmul_(grads[name], grads[name], value=0.001)
                root = (squares[name] / (1 - 0.999**count)).sqrt() + 1e-8
                weight.sub_(1e-3 * means[name] / (1 - 0.9**count) / root)
            return losses

        return step


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize(tensor.device)


def jobs_of(structure: Structure, data: tuple[Tensor, Tensor], count: int) -> list[carpool.Job]:
    """As many jobs as that, a seed each."""
    import torch

    return [
        carpool.Job(
            structure.make,
            data=data,
            loss=torch.nn.functional.cross_entropy,
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            batch_size=BATCH_SIZE,
            epochs=structure.epochs,
            seed=seed,
        )
        for seed in range(count)
    ]


# Networks and data


def mlp() -> nn.Module:
    """A hidden layer of 64."""
    from torch import nn

    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def cnn() -> nn.Module:
    """Two convolutions."""
    from torch import nn

    parts = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    parts += [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 4 * 4, CLASSES))


STRUCTURES = (
    Structure("MLP 32-64-10, batch 32", mlp, (32,), epochs=20),
    Structure("CNN of two convolutions, 16×16, batch 32", cnn, (1, 16, 16), epochs=2),
)


def drawn(structure: Structure) -> tuple[Tensor, Tensor]:
    """Noise whose class is what a hidden linear map says."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *structure.shape, generator=generator)
    hidden = torch.randn(x[0].numel(), CLASSES, generator=generator)
    return x, (x.flatten(1) @ hidden).argmax(-1)
