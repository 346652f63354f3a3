"""A real GPU that runs full: a process that may take a small part of it, and jobs that do not know."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool.events import GroupFellBack
from carpool.result import Outcome

pytestmark = pytest.mark.gpu


def net(hidden):
    return nn.Sequential(nn.Linear(1024, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def job(seed, hidden=4096, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 1024, generator=generator)
    y = torch.randint(0, 10, (4096,), generator=generator)
    return carpool.Job(
        partial(net, hidden),
        (x, y),
        name=str(seed),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        batch_size=2048,
        epochs=3,
        seed=seed,
        **options,
    )


@pytest.fixture
def small():
    """Lets torch take 2 GiB of the device."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 30)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("small")
def test_a_group_too_wide_for_the_device_shrinks_until_it_fits():
    fell = []
    hear = lambda event: fell.append(event) if isinstance(event, GroupFellBack) else None  # noqa: E731
    jobs = [job(seed) for seed in range(24)]  # 24 × 67 MB of weights and moments, and activations
    results = carpool.train(jobs, device="cuda", strategy="fused", reporters=[hear], compile=False)
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert any("out of memory" in event.reason for event in fell)


@pytest.mark.usefixtures("small")
def test_a_limit_that_is_said_is_kept_without_running_full():
    fell = []
    hear = lambda event: fell.append(event) if isinstance(event, GroupFellBack) else None  # noqa: E731
    jobs = [job(seed) for seed in range(24)]
    results = carpool.train(
        jobs, device="cuda", memory="1800MiB", strategy="fused", reporters=[hear], compile=False
    )
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert not fell


def test_memory_is_back_after_every_wave():
    used = []  # torch's own count: what the driver sees is also other processes'; `benchmarks memory` records that
    for _ in range(5):
        carpool.train([job(seed, 256) for seed in range(8)], device="cuda", reporters=[], compile=False)
        used.append(torch.cuda.memory_reserved())
    assert max(used[1:]) - min(used[1:]) <= 64 << 20


def test_a_worker_keeps_its_budget_and_sees_one_device():
    results = carpool.train(
        [job(0, 256, budget="1GiB"), job(1, 512, budget="1GiB")],
        device="cuda",
        strategy="isolated",
        reporters=[],
    )
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert {result.strategy for result in results} == {"isolated"}
