"""Narrower stacks: measured where a run is long enough, remembered, used, and without a trace."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from live import X, Y, live_jobs, net, same, state_of
from torch.nn import functional as F

import carpool
from carpool.adapters.torch import fused, narrow
from carpool.adapters.torch.fused import StackedSession
from carpool.adapters.torch.train import TorchAdapter
from carpool.events import Event, GroupAdvanced, GroupTried
from carpool.job import Job
from carpool.planning.cursor import Chunk
from carpool.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("trials")

Timed = Callable[[int], float]


def wide_is_slow(width: int) -> float:
    return 0.05 if width == 8 else 0.005


def width_is_free(width: int) -> float:
    return 0.05


def jobs(count: int = 8, data: Any = (X, Y), **options: Any) -> list[Job]:
    """By default 120 launches."""
    settings = {"loss": F.mse_loss, "optimizer": partial(torch.optim.Adam, lr=0.01), "batch_size": 8}
    settings |= {"epochs": 40, **options}
    return [Job(net, data, name=f"s{seed}", seed=seed, **settings) for seed in range(count)]


def plan(made: list[Job], measure: bool = True, **options: Any) -> Plan:
    return carpool.plan(made, device="cpu", measure=measure, **options)


def train(made: list[Job], **options: Any) -> tuple[carpool.Results, list[Event]]:
    events: list[Event] = []
    settings = {"device": "cpu", "compile": False, "reporters": [events.append], **options}
    return carpool.train(made, **settings), events


def widths(made: Plan) -> list[int]:
    return [len(group.names) for group in made.groups]


@pytest.fixture
def launch_takes(monkeypatch: pytest.MonkeyPatch):
    """Lets a launch seem to take so long, after it really ran; says which widths were timed, and whether compiled."""
    real = StackedSession.launch
    monkeypatch.setattr(fused, "alone_s", lambda *_: 1e3)  # so that a stack of any width pays

    def seems(seconds: Timed, compiles: Callable[[int], bool] | None = None) -> list[int]:
        timed: list[int] = []

        def launch(session: StackedSession, chunk: Chunk) -> tuple[float, bool]:
            _, compiled = real(session, chunk)
            timed.append(session.width)
            return seconds(session.width), compiles(session.width) if compiles else compiled

        monkeypatch.setattr(StackedSession, "launch", launch)
        return timed

    return seems


def test_a_group_is_cut_into_the_width_that_is_faster_and_the_plan_says_so(launch_takes: Any):
    timed = launch_takes(wide_is_slow)
    made = plan(jobs())
    assert timed == [8, 4, 4]  # the last is the trial of the stack that was chosen
    assert widths(made) == [4, 4]
    assert (
        "; stacks of 4: a member's step takes 1.25 ms there, 6.25 ms in one of 8 (uncompiled)"
        in made.explain()
    )


def test_a_group_that_is_not_faster_narrow_stays_whole_and_the_plan_says_so(launch_takes: Any):
    timed = launch_takes(width_is_free)
    made = plan(jobs())
    assert timed == [8, 4, 8]
    assert widths(made) == [8]
    assert "; one stack: a member's step takes 6.25 ms there, 12.5 ms in stacks of 4" in made.explain()


def test_training_measures_remembers_and_runs_in_narrower_stacks(launch_takes: Any):
    timed = launch_takes(wide_is_slow)
    results, events = train(jobs())
    assert timed[:2] == [8, 4]
    assert {result.strategy for result in results} == {"fused"}
    assert {event.trial.members for event in events if isinstance(event, GroupTried)} == {4}
    timed.clear()
    assert widths(plan(jobs(), measure=False)) == [4, 4]
    again, _ = train(jobs())
    assert timed == []
    reference, _ = train(jobs(), strategy="in_turn")
    for one, same_again, alone in zip(results, again, reference, strict=True):
        assert one.history == same_again.history
        assert one.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-3)


def test_without_measure_nothing_is_measured(launch_takes: Any):
    timed = launch_takes(wide_is_slow)
    assert widths(plan(jobs(), measure=False)) == [8]
    assert timed == []


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "in_turn", "isolated"])
def test_what_was_asked_for_is_not_measured_nor_cut(launch_takes: Any, strategy: str):
    expected = widths(plan(jobs(), strategy=strategy))
    timed = launch_takes(wide_is_slow)
    assert widths(plan(jobs())) == [4, 4]
    timed.clear()
    assert widths(plan(jobs(), strategy=strategy)) == expected
    assert 4 not in expected
    assert timed == []


def test_a_run_of_few_launches_is_not_timed(launch_takes: Any):
    timed = launch_takes(wide_is_slow)
    train(jobs(epochs=2))
    assert timed == [8]  # the trial


def test_a_run_of_short_launches_is_timed_at_its_own_width_only(launch_takes: Any):
    timed = launch_takes(lambda width: 1e-4)
    train(jobs())
    assert timed == [8, 8]  # too short to go on, and the trial
    timed.clear()
    plan(jobs())
    assert timed == []  # nor again


def test_what_was_timed_at_another_moment_only_declines(launch_takes: Any):
    launch_takes(lambda width: 1e-4)
    plan(jobs())
    timed = launch_takes(wide_is_slow)
    plan(jobs(epochs=20_000))
    assert timed[:2] == [8, 4]


def test_a_short_run_stays_whole_whatever_is_remembered(launch_takes: Any):
    launch_takes(wide_is_slow)
    assert widths(plan(jobs())) == [4, 4]
    assert widths(plan(jobs(epochs=2), measure=False)) == [8]


def test_a_group_too_small_to_cut_is_not_timed(launch_takes: Any):
    timed = launch_takes(wide_is_slow)
    train(jobs(7))
    assert timed == [7]


def test_another_number_of_members_is_another_narrowing(launch_takes: Any):
    launch_takes(wide_is_slow)
    plan(jobs())
    assert widths(plan(jobs(9), measure=False)) == [9]
    assert widths(plan(jobs(batch_size=4), measure=False)) == [8]


def test_batches_of_a_loader_are_not_taken(launch_takes: Any):
    timed = launch_takes(wide_is_slow)

    class Loader:
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            return iter([(X[:8], Y[:8]), (X[8:16], Y[8:16])])

        def __len__(self) -> int:
            return 2

    looked, tried = Loader(), Loader()
    plan(jobs(data=looked, epochs=100), measure=False)
    assert widths(plan(jobs(data=tried, epochs=100))) == [8]
    assert tried.epochs == looked.epochs
    assert timed == []


def test_a_gpu_is_left_as_it_is():
    adapter = TorchAdapter()
    made = jobs()
    for job in made:
        adapter.describe(job)
    adapter._place.name = "cuda:0"  # nothing may be opened there
    assert adapter._stacker.narrowed(made, measure=True) is None


def test_a_launch_that_raises_leaves_the_plan_as_it_is_without(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> tuple[float, bool]:
        raise RuntimeError("no room")

    monkeypatch.setattr(StackedSession, "launch", fails)
    tried, untried = (
        re.sub(r"[\d.]+ [KMG]iB free", "", plan(jobs(), **how).explain()) for how in ({}, {"measure": False})
    )
    assert tried == untried


# Compiled


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch):
    """Says of every stack whether it was opened to be compiled, and compiles nothing."""
    real, asked = StackedSession.__init__, []

    def opened(session: StackedSession, *arguments: Any) -> None:
        recipe, known, width, device, store, compile, *others = arguments
        asked.append((width, compile))
        real(session, recipe, known, width, device, store, False, *others)
        session.asked_to_compile = compile is True  # type: ignore[attr-defined]

    def launch(session: StackedSession, chunk: Chunk) -> tuple[float, bool]:
        compiled = session.asked_to_compile  # type: ignore[attr-defined]
        return seconds[session.width, compiled], compiled

    seconds = {(8, False): 1.0, (4, False): 0.1, (8, True): 0.1, (4, True): 0.04}
    monkeypatch.setattr(StackedSession, "__init__", opened)
    monkeypatch.setattr(StackedSession, "launch", launch)
    monkeypatch.setattr(fused, "alone_s", lambda *_: 1e3)
    return asked, seconds


def test_a_step_that_would_be_compiled_is_timed_compiled_too(compiles: Any):
    asked, _ = compiles
    made = plan(jobs(epochs=400))  # 1,200 s uncompiled
    assert asked[:4] == [(8, False), (4, False), (8, True), (4, True)]
    assert widths(made) == [4, 4]
    assert "takes 10 ms there, 12.5 ms in one of 8 (compiled)" in made.explain()
    asked.clear()
    again = plan(jobs(epochs=400), measure=False)
    assert replace(again, free_bytes=made.free_bytes).explain() == made.explain()
    assert asked == []


def test_what_is_only_faster_uncompiled_is_not_cut_where_it_would_be_compiled(compiles: Any):
    _, seconds = compiles
    seconds[4, True] = 0.1
    assert widths(plan(jobs(epochs=400))) == [8]
    assert "in stacks of 4 (compiled)" in plan(jobs(epochs=400), measure=False).explain()


def test_a_run_too_short_for_compiling_several_widths_stays_whole(compiles: Any):
    asked, _ = compiles
    assert widths(plan(jobs(epochs=40))) == [8]  # 120 s uncompiled, some 30 s compiled
    assert (4, True) not in asked


def test_where_compiling_fails_nothing_is_concluded(compiles: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        StackedSession, "launch", lambda session, chunk: ({8: 1.0, 4: 0.1}[session.width], False)
    )
    assert widths(plan(jobs(epochs=400))) == [8]


def test_stacks_of_one_width_count_their_launches_together_for_compiling(launch_takes: Any):
    launch_takes(wide_is_slow)
    adapter = TorchAdapter(compile=False)
    made = jobs()
    for job in made:
        adapter.describe(job)
    whole = adapter._stacker.open(made, 8, "cpu")
    assert whole._launches("train", 8) == 120
    found = adapter._stacker.narrowed(made, measure=True)
    assert found is not None
    assert found.parts == 2
    part = adapter._stacker.open(made[:4], 4, "cpu")
    assert part._launches("train", 8) == 240


# No trace


@pytest.fixture
def tried_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "worth_trying", lambda *_: True)


@pytest.mark.usefixtures("tried_whatever_it_takes")
@pytest.mark.parametrize("seconds", [wide_is_slow, width_is_free])
def test_models_optimizers_schedules_and_random_states_are_as_they_were(launch_takes: Any, seconds: Timed):
    timed = launch_takes(seconds)
    made = live_jobs(count=8, epochs=40)
    plan(made, measure=False)  # what describing does, it has done
    before = [state_of(job) for job in made]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    plan(made)
    assert timed[:2] == [8, 4]
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.random.get_state()[1].tolist() == drawn[2]  # type: ignore[union-attr]
    for job, was in zip(made, before, strict=True):
        assert same(state_of(job), was)


def test_training_ends_on_the_same_bits(launch_takes: Any):
    """Where the whole stack is the faster one: what was tried beside it changes nothing."""
    expected, _ = train(jobs(validation_data=(X, Y)), strategy="fused")
    timed = launch_takes(width_is_free)
    found, _ = train(jobs(validation_data=(X, Y)))
    assert timed[:2] == [8, 4]
    for one, other in zip(found, expected, strict=True):
        assert one.history == other.history
        assert same(dict(one.model.state_dict()), dict(other.model.state_dict()))


def test_narrower_stacks_end_on_the_bits_of_stacks_of_that_width(launch_takes: Any):
    made = jobs()
    expected = [*train(made[:4], strategy="fused")[0], *train(made[4:], strategy="fused")[0]]
    launch_takes(wide_is_slow)
    found, _ = train(jobs())
    for one, other in zip(found, expected, strict=True):
        assert one.history == other.history
        assert same(dict(one.model.state_dict()), dict(other.model.state_dict()))


# Chunks


def test_the_first_chunk_is_as_long_as_a_turn_by_what_the_trial_showed(launch_takes: Any):
    """While others wait: three batches an epoch, but a launch that seems to take longer than a turn goes alone."""
    launch_takes(lambda width: 10.0)
    other = Job(
        lambda: torch.nn.Linear(3, 1), (X, Y), loss=F.mse_loss, optimizer=torch.optim.SGD, name="other"
    )
    _, events = train([*jobs(3, epochs=2), other])
    advanced = [event for event in events if isinstance(event, GroupAdvanced) and event.group == 0]
    assert advanced[0].steps == 3  # one step of three members
    assert sum(event.steps for event in advanced) == 3 * 6
