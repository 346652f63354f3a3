"""A step that holds Python's lock is measured on a copy, remembered, and isolated where that pays."""

import random
import sys
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from test_torch_isolated import assert_same_bits
from torch import nn

import carpool
from carpool.adapters.torch import hold
from carpool.adapters.torch.train import TorchAdapter
from carpool.planning import holds
from carpool.process.gil import Held
from carpool.testing import FakeAdapter

training = sys.modules["carpool.train"]  # `carpool.train` is the function
X = torch.randn(240, 4)
CALLS = []


def python_step(model, batch):
    """Draws from every generator, and counts."""
    CALLS.append(random.random() + np.random.rand())
    return (model(batch[0]) + 0.01 * torch.rand(1)).square().mean()


def job(width, **options):
    settings = {"optimizer": partial(torch.optim.Adam, lr=0.01), "epochs": 16, "batch_size": 60, **options}
    return carpool.Job(partial(nn.Linear, 4, width), (X,), step=python_step, **settings)


@pytest.fixture
def short(monkeypatch):
    """A tenth of a second is work enough, and the lock is always held."""
    monkeypatch.setattr(holds, "LEAST_S", 0.001)
    monkeypatch.setattr(hold, "LEAST_S", 0.0)
    monkeypatch.setattr(training, "cores", lambda: 2)
    measured = []

    def held(step):
        step()
        measured.append(step)
        return Held(0.9, 0.01)

    monkeypatch.setattr(hold, "held", held)
    return measured


def strategies(plan):
    return [group.strategy for group in plan.groups]


@pytest.mark.usefixtures("trials")
def test_jobs_that_hold_the_lock_are_isolated_by_measurement_and_it_is_remembered(short):
    def jobs():
        return [job(2), job(3)]

    CALLS.clear()
    assert strategies(carpool.plan(jobs(), device="cpu")) == ["interleaved", "interleaved"]
    described = len(CALLS)
    assert short == []  # a plan measures nothing
    ours = carpool.train(jobs(), device="cpu", reporters=[])
    assert len(short) == 2
    assert {result.strategy for result in ours} == {"isolated"}
    expected = "measured on this device: a step holds Python's interpreter lock for 90 % of its 10 ms, and other jobs wait for it"
    assert ours[0].reason == expected
    assert_same_bits(ours, carpool.train(jobs(), device="cpu", strategy="in_turn", reporters=[]))
    CALLS.clear()
    assert strategies(carpool.plan(jobs(), device="cpu")) == ["isolated", "isolated"]
    assert len(short) == 2
    assert len(CALLS) == described


@pytest.mark.slow
@pytest.mark.usefixtures("trials")
def test_a_plan_that_measures_isolates_them_too_and_training_does_not_measure_again(short):
    made = [job(2), job(3)]
    assert strategies(carpool.plan(made, device="cpu", measure=True)) == ["isolated", "isolated"]
    assert len(short) == 2
    results = carpool.train(made, device="cpu", reporters=[])
    assert len(short) == 2
    assert {result.strategy for result in results} == {"isolated"}


@pytest.mark.usefixtures("trials")
@pytest.mark.parametrize(
    "case", ["one job", "one core", "too short", "lock released", "cannot be pickled", "asked otherwise"]
)
def test_others_are_not(short, monkeypatch, case):
    jobs, strategy = [job(2), job(3)], "auto"
    if case == "one job":
        jobs = jobs[:1]
    elif case == "one core":
        monkeypatch.setattr(training, "cores", lambda: 1)
    elif case == "too short":
        monkeypatch.setattr(holds, "LEAST_S", 10.0)
    elif case == "lock released":
        monkeypatch.setattr(hold, "held", lambda step: Held(0.05, 0.01))
    elif case == "cannot be pickled":
        jobs = [replace(one, config={"lock": threading.Lock()}) for one in jobs]
    else:
        strategy = "interleaved"
    results = carpool.train(jobs, device="cpu", strategy=strategy, reporters=[])
    assert {result.strategy for result in results} == {"interleaved"}


def reseed():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.usefixtures("trials")
def test_measuring_leaves_no_trace(short):
    one = job(2, name="one")
    adapter = TorchAdapter()
    adapter.device("cpu")
    adapter.describe(one)
    before = [t.clone() for t in adapter.trained(one).model.state_dict().values()]
    reseed()
    found = adapter.hold(one, measure=True)
    assert found is not None
    assert len(short) == 1
    drawn = random.random(), np.random.rand(), torch.rand(1)
    reseed()
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))
    trained = adapter.trained(one)
    assert all(torch.equal(a, b) for a, b in zip(before, trained.model.state_dict().values(), strict=True))
    assert not trained.optimizer.state
    assert all(p.grad is None for p in trained.model.parameters())


@pytest.mark.usefixtures("trials")
def test_a_short_job_is_not_even_tried(short):
    adapter = TorchAdapter()
    adapter.device("cpu")
    one = job(2, epochs=1, name="one")
    adapter.describe(one)
    CALLS.clear()
    assert adapter.hold(one, measure=True) is None
    assert CALLS == []


def test_loops_and_other_frameworks_are_never_measured():
    from carpool.adapters.loop.train import LoopAdapter

    def walk():
        raise AssertionError("was run")
        yield {}

    assert LoopAdapter().hold(carpool.Loop(walk), measure=True) is None
    assert FakeAdapter().hold(job(2), measure=True) is None
