"""Fused kernels lent to a job's own optimizer: the same numbers, options and state, and only where they fit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import carpool

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str, data: Any = (X, Y)
) -> carpool.Result:
    job = carpool.Job(model, data, name="a", loss=F.mse_loss, optimizer=optimizer, batch_size=8, epochs=3)
    (result,) = carpool.train([job], device="cpu", reporters=[], strategy=strategy)
    if result.error is not None:
        raise result.error
    return result


class Viewed(nn.Module):
    """A weight that is a view with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5)[:, :3])
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x @ self.weight)


def both(make: Any, optimizer: Any, data: Any = (X, Y)) -> tuple[carpool.Result, carpool.Result]:
    found = []
    for strategy in ("in_turn", "interleaved"):
        torch.manual_seed(0)
        model = make()
        found.append(train(model, optimizer(model.parameters()), strategy, data))
    return found[0], found[1]


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [partial(nn.Linear, 3, 1), Viewed], ids=["linear", "viewed"])
def test_weights_options_and_state_are_as_without(make: Any, optimizer: str):
    plain, quick = both(make, OPTIMIZERS[optimizer])
    for a, b in zip(plain.model.parameters(), quick.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert plain.optimizer.state_dict()["param_groups"] == quick.optimizer.state_dict()["param_groups"]
    ours, theirs = quick.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for key, slots in theirs.items():
        assert ours[key].keys() == slots.keys()
        for name, slot in slots.items():
            if isinstance(slot, torch.Tensor):
                assert ours[key][name].dtype == slot.dtype
                assert torch.allclose(ours[key][name], slot, atol=1e-6)


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": False}, {"foreach": True}])
def test_a_choice_of_the_users_is_kept(options: dict[str, bool]):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    train(model, optimizer, "interleaved")
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == before


def test_sparse_gradients_train():
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1))

    data = (torch.randint(0, 10, (24,)), Y)
    plain, quick = both(make, OPTIMIZERS["sgd"], data)
    for a, b in zip(plain.model.parameters(), quick.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_going_on_from_a_fused_run_with_another_memory_format():
    x, y = torch.randn(16, 3, 6, 6), torch.randint(0, 2, (16,))

    def trained(second: str) -> list[nn.Module]:
        models, optimizers = [], []
        for seed in range(2):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).double()
            models.append(model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
            optimizers.append(torch.optim.Adam(models[-1].parameters(), lr=0.01))
        for strategy in ("fused", second):
            jobs = [
                carpool.Job(m, (x.double(), y), name=f"j{i}", loss=F.cross_entropy, optimizer=o, epochs=2)
                for i, (m, o) in enumerate(zip(models, optimizers, strict=True))
            ]
            carpool.train(jobs, device="cpu", reporters=[], strategy=strategy, compile=False)
        return models

    for one, two in zip(trained("in_turn"), trained("interleaved"), strict=True):
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-9)


class Late(nn.Module):
    """The second part learns from the second epoch on, when the first has gathered momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training and type(x) is torch.Tensor
        return self.first(x) + self.second(x) if self.calls > 4 else self.first(x)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_that_gets_its_first_gradient_later_than_others_learns_as_without(momentum: float):
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=momentum)
    plain, quick = both(Late, sgd)
    for ours, theirs in zip(quick.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert quick.optimizer.param_groups[0]["fused"] is None
