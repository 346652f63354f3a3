"""What one job may do to another through objects they share, and through the run: nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import carpool
from carpool.errors import FusionError, ModelError

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()


def job(name: str, model: Any = net, data: Any = (X, Y), **options: Any) -> carpool.Job:
    defaults = {
        "loss": F.mse_loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "batch_size": 8,
        "epochs": 3,
    }
    return carpool.Job(model, data, name=name, **{**defaults, **options})


def train(*jobs: carpool.Job, **options: Any) -> carpool.Results:
    return carpool.train(jobs, **{"device": "cpu", "reporters": [], "compile": False, **options})


def test_an_optimizer_that_keeps_more_than_tensors_trains():
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index]
            return super().step(closure)

    results = train(job("counts", optimizer=partial(Counting, lr=0.1)), job("other", partial(net, 5)))
    assert {result.outcome.word for result in results} == {"completed"}
    assert results["counts"].optimizer.state["count"] == 9


def test_normalisation_that_jobs_share_in_training_mode_is_refused():
    trunk = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double().requires_grad_(False)
    shared = [job(name, lambda: nn.Sequential(trunk, net())) for name in "ab"]
    with pytest.raises(ModelError, match="its own normalisation in training mode"):
        train(*shared)
    trunk.eval()
    assert {result.outcome.word for result in train(*shared)} == {"completed"}


def test_buffers_that_validation_writes_are_not_stacked():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return self.net(x) / (1 + self.seen * 0.1)

    jobs = [job(name, Counted, validation_data=(X, Y), seed=seed) for seed, name in enumerate("ab")]
    plan = carpool.plan(jobs, device="cpu")
    assert "validation writes into the buffer 'seen'" in plan.groups[0].reason
    with pytest.raises(FusionError, match="'seen'"):
        train(*jobs, strategy="fused")


def test_a_group_that_falls_back_starts_again_with_the_rates_it_had():
    class Changing:
        """Another shape from the third pass on."""

        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            for x, y in zip(X.split(8), Y.split(8), strict=True):
                yield x[:, None].repeat(1, 2 if self.passes < 3 else 3, 1), y

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x.mean(1))

    def rates(strategy: str) -> list[float]:
        source, jobs, optimizers = Changing(), [], []
        for seed, name in enumerate("ab"):
            torch.manual_seed(seed)
            model = Mean()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def halve(event: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.param_groups[0]["lr"] *= 0.5

            optimizers.append(optimizer)
            jobs.append(job(name, model, source, optimizer=optimizer, epochs=4, callbacks=[halve]))
        train(*jobs, strategy=strategy)
        return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

    assert rates("auto") == rates("interleaved") == [0.1 / 16] * 2


def test_a_refusal_at_planning_leaves_no_thread():
    data = TensorDataset(X, Y)
    jobs = [job("a", data=DataLoader(data, 8)), job("b", partial(net, 5), DataLoader(data, 8))]
    with pytest.raises(FusionError):
        train(*jobs, strategy="fused")
    assert [t.name for t in threading.enumerate() if t.name.startswith("carpool")] == []


@pytest.mark.parametrize("priority", [17, -17])
def test_priorities_are_bounded(priority: int):
    with pytest.raises(carpool.CarpoolError, match="a priority from -16 to 16"):
        job("a", priority=priority)
