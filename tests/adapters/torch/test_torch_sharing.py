"""A frozen trunk that jobs share is held once and computed once a batch; and every job ends as it would alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import carpool

WIDE, BATCH, SAMPLES = 64, 8, 32
X = torch.randn(SAMPLES, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def make_trunk() -> nn.Module:
    torch.manual_seed(5)
    trunk = nn.Sequential(
        nn.Linear(16, WIDE), nn.BatchNorm1d(WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)
    ).double()
    return trunk.eval().requires_grad_(False)


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(WIDE, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


def jobs(count: int, trunk: nn.Module, data: Any = None, **options: Any) -> list[carpool.Job]:
    defaults = {"loss": F.mse_loss, "batch_size": BATCH, "epochs": 3}
    return [
        carpool.Job(
            partial(Headed, trunk),
            data if data is not None else (X, Y),
            name=f"lr {number}",
            optimizer=lambda p, lr=0.01 * (number + 1): torch.optim.Adam(
                [q for q in p if q.requires_grad], lr=lr
            ),
            **{**defaults, **options},
        )
        for number in range(count)
    ]


def train(made: list[carpool.Job], **options: Any) -> carpool.Results:
    return carpool.train(made, **{"device": "cpu", "reporters": [], "compile": False, **options})


def flops(count: int, **options: Any) -> int:
    """Of all steps, but for those that check the first one, and those that are traced."""
    train(jobs(count, make_trunk(), **options), strategy="fused")
    with FlopCounterMode(display=False) as counter:
        train(jobs(count, make_trunk(), **options), strategy="fused")
    everything = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        train(jobs(count, make_trunk(), **{**options, "epochs": 1}), strategy="fused")
    return everything - counter.get_total_flops()


STEPS = 2 * SAMPLES // BATCH  # what the runs above differ by: two epochs
TRUNK = STEPS * 2 * BATCH * (16 * WIDE + WIDE * WIDE)
HEAD = STEPS * 2 * BATCH * WIDE * 2  # forward, and the gradient of its weights


@pytest.mark.parametrize("count", [2, 8])
def test_a_shared_trunk_is_computed_once_a_batch(count: int):
    assert flops(count) == TRUNK + count * HEAD


def test_members_that_read_other_batches_compute_it_each():
    def seeded() -> int:
        with FlopCounterMode(display=False) as counter:
            made = jobs(2, make_trunk())
            train(
                [made[0], *(carpool.Job(**{**vars(made[1]), "seed": 1}) for _ in range(1))], strategy="fused"
            )
        return counter.get_total_flops()

    with FlopCounterMode(display=False) as counter:
        train(jobs(2, make_trunk()), strategy="fused")
    assert seeded() > counter.get_total_flops() + TRUNK // 2


@pytest.mark.parametrize("kind", ["arrays", "loader"])
def test_every_job_ends_as_it_would_alone(kind: str):
    data = (X, Y) if kind == "arrays" else DataLoader(TensorDataset(X, Y), batch_size=BATCH)
    options = {"validation_data": (X[:10], Y[:10])}
    together = train(jobs(4, make_trunk(), data, **options), strategy="fused")
    alone = train(jobs(4, make_trunk(), data, **options), strategy="in_turn")
    for one, other in zip(together, alone, strict=True):
        assert one.history["val_loss"] == pytest.approx(other.history["val_loss"], rel=1e-9)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-9)


def test_the_trunk_stays_one_object_and_as_it_was():
    trunk = make_trunk()
    before = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    results = train(jobs(3, trunk), strategy="fused")
    assert all(result.model.trunk is trunk for result in results)
    assert all(torch.equal(before[name], tensor) for name, tensor in trunk.state_dict().items())


def test_a_neighbour_that_leaves_changes_no_bit():
    def run(epochs: int) -> carpool.Results:
        made = jobs(3, make_trunk())
        made[1] = carpool.Job(**{**vars(made[1]), "epochs": epochs})
        return train(made, strategy="fused")

    stays, leaves = run(3), run(1)
    for place in (0, 2):
        assert all(
            torch.equal(a, b)
            for a, b in zip(stays[place].model.parameters(), leaves[place].model.parameters(), strict=True)
        )
