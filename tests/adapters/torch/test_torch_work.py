"""How much the convolutions of a step compute, and who is planned apart for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import carpool
from carpool.adapters.torch import train
from carpool.adapters.torch.behaviour import behaviour
from carpool.adapters.torch.probe import probe
from carpool.adapters.torch.train import TorchAdapter
from carpool.adapters.torch.work import Convolved, busy, told


@pytest.mark.parametrize(
    ("layer", "sizes", "flops"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 5, 5), 2 * (2 * 8 * 25) * (3 * 9)),
        (nn.Conv2d(4, 8, 3, stride=2, groups=2), (2, 4, 5, 5), 2 * (2 * 8 * 4) * (2 * 9)),
        (nn.Conv1d(3, 8, 5), (2, 3, 9), 2 * (2 * 8 * 5) * (3 * 5)),
        (nn.ConvTranspose2d(3, 8, 2, stride=2), (2, 3, 5, 5), 2 * (2 * 3 * 25) * (8 * 4)),
        (nn.Linear(3, 8), (2, 3), 0),
    ],
)
def test_a_multiplication_and_an_addition_for_each_weight_that_a_number_meets(
    layer: nn.Module, sizes: tuple[int, ...], flops: int
):
    with FakeTensorMode(allow_non_fake_inputs=True), Convolved() as counted:
        layer(torch.empty(sizes))
    assert counted.flops == flops


def test_by_name_and_from_a_frozen_trunk():
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(8, 3, 3, 3, requires_grad=True)
    with Convolved() as counted:
        F.conv2d(weight=weight, input=x)
    assert counted.flops == 2 * (2 * 8 * 9) * 27
    with Convolved() as counted:
        F.conv2d(x, weight.detach())
    assert counted.flops == 0  # a stack computes it once for all its members


def test_models_with_branches_are_probed_as_before():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolve = nn.Conv2d(1, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.convolve(x).flatten(1)
            return torch.cond(made.sum() > 0, torch.sin, torch.cos, (made,))

    built = TorchAdapter()._build(replace(job(0), model=Branching))
    shown = probe(built, behaviour)
    assert (shown.failure, shown.convolved) == (None, 2 * (4 * 2 * 4) * 9)


def test_a_small_gpu_is_busy_sooner_and_a_cpu_never():
    assert not told(10**10, processors=132)
    assert (
        told(10**10, processors=20) == "one job's step keeps the GPU busy: 10 GFLOP in convolutions, forward"
    )
    assert not busy(10**15, "cpu")


DATA = (torch.randn(12, 1, 4, 4), torch.randint(0, 2, (12,)))


def job(seed: int) -> carpool.Job:
    return carpool.Job(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
        DATA,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=4,
        seed=seed,
        name=f"s{seed}",
    )


def test_a_job_is_described_by_what_its_batch_takes(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr(train, "busy", lambda flops, device: seen.append(flops) or "full")
    adapter = TorchAdapter()
    adapter.device("cpu")
    assert adapter.describe(job(0)).busy == "full"
    assert seen == [2 * (4 * 2 * 4) * 9]


def test_busy_jobs_train_beside_one_another_and_end_where_they_do_alone(monkeypatch: pytest.MonkeyPatch):
    alone = carpool.train([job(seed) for seed in range(3)], device="cpu", strategy="in_turn", reporters=[])
    monkeypatch.setattr(train, "busy", lambda *_: "one is enough")
    beside = carpool.train([job(seed) for seed in range(3)], device="cpu", compile=False, reporters=[])
    assert {(result.strategy, result.reason) for result in beside} == {("interleaved", "one is enough")}
    for one, other in zip(beside, alone, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-5)


def test_jobs_alone_of_one_structure_share_what_compiling_takes(monkeypatch: pytest.MonkeyPatch):
    adapter = TorchAdapter(compile=True)
    adapter.device("cpu")
    jobs = [replace(job(seed), epochs=2) for seed in range(3)]
    for one in (*jobs, jobs[0]):  # described twice, it is one job all the same
        adapter.describe(one)
    opened: list[int] = []
    monkeypatch.setattr(adapter._stacker, "open_alone", lambda job, device, stacks: opened.append(stacks))
    adapter.open(jobs[0], "cpu")
    assert opened == [3]
