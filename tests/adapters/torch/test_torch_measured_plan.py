"""`plan(measure=True)`: it measures what training would, remembers it, and leaves everything as it was."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from live import X, Y, live_jobs, net, same, state_of
from torch import nn
from torch.nn import functional as F

import carpool
from carpool.adapters.torch import fused
from carpool.events import Event, GroupFellBack
from carpool.job import Job
from carpool.memory import estimate
from carpool.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("trials")


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4000), nn.Linear(4000, 1))


def jobs(count: int = 3, model: Any = net, data: Any = (X, Y), **options: Any) -> list[Job]:
    settings = {"loss": F.mse_loss, "optimizer": partial(torch.optim.Adam, lr=0.01), "batch_size": 8}
    settings |= {"epochs": 2, **options}
    return [Job(model, data, name=f"s{seed}", seed=seed, **settings) for seed in range(count)]


def explained(plan: Plan) -> str:
    """Without what is free, which other programs change."""
    return replace(plan, free_bytes=0).explain()


def measured(made: list[Job], **options: Any) -> Plan:
    return carpool.plan(made, device="cpu", measure=True, **options)


@pytest.fixture
def alone_takes(monkeypatch: pytest.MonkeyPatch):
    """Lets a step alone seem to take so long, and counts how often that was asked."""

    def seems(seconds: float) -> list[float]:
        asked: list[float] = []
        monkeypatch.setattr(fused, "alone_step", lambda *_: (asked.append(seconds), lambda: seconds)[1])
        return asked

    return seems


def test_a_group_that_gains_is_planned_fused_and_the_reason_says_what_was_measured(alone_takes: Any):
    alone_takes(1e3)
    (group,) = measured(jobs()).groups
    assert group.strategy == "fused"
    assert re.search(r"\(measured on this device( on [-\d]+)?: a step of 3 together takes ", group.reason)
    assert group.reason.endswith("one after another 3e+03 s)")


def test_a_group_that_is_slower_together_is_planned_one_by_one(alone_takes: Any):
    alone_takes(1e-9)
    made = measured(jobs())
    assert [group.strategy for group in made.groups] == ["interleaved"] * 3
    assert "because measured on this device: a step of 3 together takes " in made.explain()


def test_without_measure_nothing_is_measured(alone_takes: Any):
    asked = alone_takes(1e-9)
    assert carpool.plan(jobs(), device="cpu").groups[0].strategy == "fused"
    assert asked == []


def test_the_next_plan_and_training_use_what_is_remembered(alone_takes: Any):
    asked = alone_takes(1e-9)
    measured(jobs())
    assert len(asked) == 1
    again = measured(jobs())
    assert [group.strategy for group in again.groups] == ["interleaved"] * 3
    assert explained(carpool.plan(jobs(), device="cpu")) == explained(again)
    events: list[Event] = []
    results = carpool.train(jobs(), device="cpu", reporters=[events.append])
    assert len(asked) == 1
    assert {result.strategy for result in results} == {"interleaved"}
    assert not [event for event in events if isinstance(event, GroupFellBack)]


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "in_turn", "isolated"])
def test_what_was_asked_for_is_not_measured(alone_takes: Any, strategy: str):
    asked = alone_takes(1e-9)
    assert {group.strategy for group in measured(jobs(), strategy=strategy).groups} == {strategy}
    assert asked == []


def test_a_stack_that_memory_cuts_is_measured_at_its_own_width(
    alone_takes: Any, monkeypatch: pytest.MonkeyPatch
):
    alone_takes(1e3)
    monkeypatch.setattr(estimate, "CHECKED_BYTES", 0)  # checking would fill so small a device
    made = measured(jobs(9, wide), memory="5MiB")
    width = len(made.groups[0].names)
    assert 1 < width < 9
    assert f"a step of {width} together takes " in made.groups[0].reason


# No trace


@pytest.mark.parametrize("seconds", [1e3, 1e-9])
def test_models_optimizers_schedules_and_random_states_are_as_they_were(alone_takes: Any, seconds: float):
    asked = alone_takes(seconds)
    made = live_jobs()
    carpool.plan(made, device="cpu")  # what describing does, it has done
    before = [state_of(job) for job in made]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    measured(made)
    assert len(asked) == 1
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.random.get_state()[1].tolist() == drawn[2]  # type: ignore[union-attr]
    for job, was in zip(made, before, strict=True):
        assert same(state_of(job), was)


def test_a_step_alone_that_is_really_taken_leaves_no_trace_either():
    made = live_jobs()
    carpool.plan(made, device="cpu")
    before, drawn = [state_of(job) for job in made], torch.get_rng_state()
    measured(made)
    assert torch.equal(torch.get_rng_state(), drawn)
    for job, was in zip(made, before, strict=True):
        assert same(state_of(job), was)


@pytest.mark.parametrize("seconds", [1e3, 1e-9])
def test_training_ends_on_the_same_bits(alone_takes: Any, seconds: float):
    alone_takes(seconds)
    strategy = "fused" if seconds > 1 else "interleaved"
    expected = carpool.train(jobs(), device="cpu", strategy=strategy, compile=False, reporters=[])
    made = jobs()
    measured(made)
    found = carpool.train(made, device="cpu", compile=False, reporters=[])
    assert {result.strategy for result in found} == {strategy}
    for one, other in zip(found, expected, strict=True):
        assert one.history == other.history
        assert same(dict(one.model.state_dict()), dict(other.model.state_dict()))


def test_batches_of_a_loader_are_not_taken(alone_takes: Any):
    asked = alone_takes(1e-9)

    class Loader:
        def __init__(self) -> None:
            self.epochs = 0

        def __iter__(self):
            self.epochs += 1
            return iter([(X[:8], Y[:8]), (X[8:16], Y[8:16])])

        def __len__(self) -> int:
            return 2

    looked, tried = Loader(), Loader()
    carpool.plan(jobs(data=looked), device="cpu")
    assert measured(jobs(data=tried)).groups[0].strategy == "fused"
    assert tried.epochs == looked.epochs
    assert asked == []


def test_a_trial_that_raises_leaves_the_plan_as_it_is_without(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> float:
        raise RuntimeError("no room")

    monkeypatch.setattr(fused, "alone_step", fails)
    assert explained(measured(jobs())) == explained(carpool.plan(jobs(), device="cpu"))
