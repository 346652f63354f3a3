"""Trials: a group that is slower together goes on job by job, and the plan remembers it."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import carpool
from carpool import recall, windows
from carpool.adapters.torch import fused
from carpool.events import Event, GroupAdvanced, GroupFellBack, GroupTried
from carpool.planning.trials import Trial

pytestmark = pytest.mark.usefixtures("trials")
AGREE = windows.agree  # before the fixture lets all windows agree
X, Y = torch.randn(24, 3), torch.randn(24, 1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))


def jobs(count: int = 3, **options: Any) -> list[carpool.Job]:
    defaults = {
        "loss": F.mse_loss,
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "batch_size": 8,
        "epochs": 2,
    }
    return [
        carpool.Job(net, (X, Y), name=f"s{seed}", seed=seed, **{**defaults, **options})
        for seed in range(count)
    ]


def train(made: list[carpool.Job], **options: Any) -> tuple[carpool.Results, list[Event]]:
    events: list[Event] = []
    settings = {"device": "cpu", "compile": False, "reporters": [events.append], **options}
    return carpool.train(made, **settings), events


def of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture
def alone_takes(monkeypatch: pytest.MonkeyPatch):
    """Lets a step alone seem to take so long, and a launch a second: nothing hangs on the machine."""
    monkeypatch.setattr(fused.StackedSession, "_launch", lambda session, chunk: (lambda: 1.0, False))
    return lambda seconds: monkeypatch.setattr(fused, "alone_step", lambda *_: lambda: seconds)


def test_a_group_that_is_faster_together_stays_together(alone_takes: Any):
    alone_takes(1e3)
    results, events = train(jobs())
    (tried,) = of(events, GroupTried)
    assert tried.trial.members == 3
    assert tried.trial.gain > 1
    assert {result.strategy for result in results} == {"fused"}


def test_a_group_that_is_slower_together_goes_on_job_by_job(alone_takes: Any):
    alone_takes(1e-9)
    results, events = train(jobs())
    (fell,) = of(events, GroupFellBack)
    assert fell.reason.startswith("measured: a step of 3 together takes ")
    assert {result.strategy for result in results} == {"interleaved"}
    reference, _ = train(jobs(), strategy="interleaved")
    for one, other in zip(results, reference, strict=True):
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_the_plan_remembers_and_says_so(alone_takes: Any):
    alone_takes(1e-9)
    assert carpool.plan(jobs(), device="cpu").groups[0].strategy == "fused"
    train(jobs())
    plan = carpool.plan(jobs(), device="cpu")
    assert {group.strategy for group in plan.groups} == {"interleaved"}
    day = r"\d{4}-\d{2}-\d{2}"
    assert re.search(rf"measured on this device on {day}: a step of 3 together takes", plan.explain())
    results, events = train(jobs())
    assert of(events, GroupTried) == of(events, GroupFellBack) == []
    assert {result.strategy for result in results} == {"interleaved"}


def test_windows_that_disagree_decide_nothing_and_are_not_kept(
    alone_takes: Any, monkeypatch: pytest.MonkeyPatch, untried: Path
):
    """A machine that was busy in some of the windows may have slowed either of the two."""
    alone_takes(1.0)
    monkeypatch.setattr(windows, "agree", AGREE)
    noisy = itertools.cycle([1.0, 3.0, 1e-3, 40.0, 1.0])
    monkeypatch.setattr(fused.StackedSession, "_launch", lambda session, chunk: (lambda: next(noisy), False))
    results, events = train(jobs())
    assert of(events, GroupTried) == []
    assert {result.strategy for result in results} == {"fused"}
    assert recall.count() == 0


def test_what_a_busy_machine_showed_is_used_and_not_kept(alone_takes: Any, monkeypatch: pytest.MonkeyPatch):
    alone_takes(1e-9)
    monkeypatch.setattr(windows.Waited, "share", lambda self: 0.5)
    results, _ = train(jobs())
    assert {result.strategy for result in results} == {"interleaved"}
    assert {group.strategy for group in carpool.plan(jobs(), device="cpu").groups} == {"interleaved"}
    assert recall.count() == 0, "the next process measures anew"


def test_another_width_or_structure_is_another_trial(alone_takes: Any):
    alone_takes(1e-9)
    train(jobs())
    assert carpool.plan(jobs(4), device="cpu").groups[0].strategy == "fused"
    assert carpool.plan(jobs(batch_size=4), device="cpu").groups[0].strategy == "fused"


def test_fused_that_was_asked_for_is_not_tried(alone_takes: Any):
    alone_takes(1e-9)
    train(jobs())
    results, events = train(jobs(), strategy="fused")
    assert of(events, GroupTried) == []
    assert {result.strategy for result in results} == {"fused"}


def test_a_trial_leaves_no_trace():
    tried, events = train(jobs(validation_data=(X, Y)))
    assert len(of(events, GroupTried)) == 1
    untried, _ = train(jobs(validation_data=(X, Y)), strategy="fused")
    if {result.strategy for result in tried} == {"fused"}:
        for one, other in zip(tried, untried, strict=True):
            assert one.history == other.history
    else:  # on this machine it was slower together: then it equals the jobs alone
        alone, _ = train(jobs(validation_data=(X, Y)), strategy="in_turn")
        for one, other in zip(tried, alone, strict=True):
            assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-5)


def test_what_is_measured_is_time():
    _, events = train(jobs())
    (tried,) = of(events, GroupTried)
    assert isinstance(tried.trial, Trial)
    assert tried.trial.together_s > 0
    assert tried.trial.alone_s > 0


def test_the_first_chunk_is_as_long_as_a_turn_by_what_the_trial_showed(
    alone_takes: Any, monkeypatch: pytest.MonkeyPatch
):
    """While others wait: three batches an epoch, but a launch that seems to take longer than a turn goes alone."""
    alone_takes(1e3)
    monkeypatch.setattr(fused.StackedSession, "_launch", lambda session, chunk: (lambda: 10.0, False))
    other = carpool.Job(
        lambda: nn.Linear(3, 1), (X, Y), loss=F.mse_loss, optimizer=torch.optim.SGD, name="other"
    )
    _, events = train([*jobs(), other])
    advanced = [event for event in of(events, GroupAdvanced) if event.group == 0]
    assert advanced[0].steps == 3  # one step of three members
    assert sum(event.steps for event in advanced) == 3 * 6
