"""Panels: a wide stack on a CPU runs in parts, and nobody can tell by the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import mlp, plain_loop, plain_objects, shown, tables

import carpool
from carpool.adapters.torch import panels, stack
from carpool.adapters.torch.fused import StackedSession
from carpool.adapters.torch.panels import Panels
from carpool.adapters.torch.program import Program
from carpool.adapters.torch.train import TorchAdapter
from carpool.events import Event, GroupFellBack, GroupResized
from carpool.job import Job
from carpool.planning.cursor import Chunk, Cursor, cut
from carpool.result import Outcome, Result, Results
from carpool.testing.conformance import assert_close

BAD = 4  # in the second of three panels
STEPS = 3  # of an epoch


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = tables(True)["vector"]
    return x[: 16 * STEPS], y[: 16 * STEPS]


def double_mlp() -> nn.Module:
    return mlp().double()


def jobs(count: int = 8, make: Any = double_mlp, **options: Any) -> list[Job]:
    settings = {"loss": F.cross_entropy, "batch_size": 16, "epochs": 3, **options}
    return [
        Job(
            make,
            data(),
            name=f"m{seed}",
            optimizer=partial(torch.optim.Adam, lr=0.01 + 0.001 * seed),
            seed=seed,
            **settings,
        )
        for seed in range(count)
    ]


def train(made: list[Job], **options: Any) -> tuple[Results, list[Event]]:
    events: list[Event] = []
    settings = {"device": "cpu", "compile": False, "strategy": "fused", "reporters": [events.append]}
    return carpool.train(made, **{**settings, **options}), events


def opened(made: list[Job]) -> tuple[StackedSession, Chunk]:
    """A stack of these jobs, and the first step of its first chunk."""
    adapter = TorchAdapter(compile=False)
    supplied = {row: adapter.describe(job).course.supply(0) for row, job in enumerate(made)}
    chunk = cut(supplied, dict.fromkeys(supplied, Cursor()), max_steps=1)
    assert chunk is not None
    return adapter._stacker.open(made, len(made), "cpu"), chunk


def assert_alone(job: Job, result: Result) -> None:
    """The result is what a plain loop gives."""
    assert (result.outcome, result.strategy) == (Outcome.COMPLETED, "fused")
    got = shown(result.model, result.optimizer, result.history["loss"])
    assert_close(got, plain_loop(job, *plain_objects(job)), double=True)


def watch(monkeypatch: pytest.MonkeyPatch, seen: Callable[[Program, int], None]) -> None:
    """Has every step on a CPU looked at before it runs, with the number of steps that its launch has."""
    real = Program._run_here

    def run(program: Program, steps: int) -> None:
        call: Any = program._call

        def looked_at(*inputs: Any) -> None:
            seen(program, steps)
            call(*inputs)

        monkeypatch.setattr(program, "_call", looked_at)
        try:
            real(program, steps)
        finally:
            monkeypatch.setattr(program, "_call", call)

    monkeypatch.setattr(Program, "_run_here", run)


@pytest.fixture
def of_three(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A cache with room for three members of any kind; says which panels have run, step by step."""
    monkeypatch.setattr(panels, "num_panels", lambda width, *_: -(-width // 3))
    ran: list[int] = []
    watch(monkeypatch, lambda program, steps: ran.append(program.at))
    return ran


def test_members_end_where_they_would_alone(of_three: list[int]):
    made = jobs()
    results, events = train(made)
    assert set(of_three) == {0, 1, 2}
    assert not any(isinstance(event, GroupFellBack) for event in events)
    for job, result in zip(made, results, strict=True):
        assert_alone(job, result)


def test_a_panel_takes_all_steps_of_a_chunk_before_the_next(of_three: list[int]):
    train(jobs(epochs=1))
    assert of_three == [0, 1, 2] + [0] * STEPS + [1] * STEPS + [2] * STEPS  # the check first


def test_validation_schedules_and_clipping_are_each_members_own(of_three: list[int]):
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    made = jobs(validation_data=data(), scheduler=schedule, clip_norm=0.1)
    results, _ = train(made)
    alone, _ = train(made, strategy="in_turn")
    for job, one, other in zip(made, results, alone, strict=True):
        assert_alone(job, one)
        assert one.history["val_loss"] == pytest.approx(other.history["val_loss"], rel=1e-9)


def test_a_panel_whose_members_have_ended_does_not_run(of_three: list[int]):
    """Courses of unequal length: the first panel's three members end after one epoch."""
    made = [replace(job, epochs=1 if number < 3 else 3) for number, job in enumerate(jobs())]
    results, _ = train(made)
    for job, result in zip(made, results, strict=True):
        assert_alone(job, result)
    assert [of_three.count(panel) for panel in range(3)] == [1 + STEPS, 1 + 3 * STEPS, 1 + 3 * STEPS]


def test_a_member_whose_batch_raises_fails_alone_and_the_others_lose_no_step(of_three: list[int]):
    """The panel before it is through the chunk by then, the one after it has not begun."""
    x, y = data()
    spoiled = y.clone()
    spoiled[int(carpool.batch_order(BAD, 0, len(y))[-1])] = 99
    made = jobs()
    made[BAD] = replace(made[BAD], data=(x, spoiled))
    results, events = train(made)
    bad = results[BAD]
    assert (bad.outcome, bad.steps) == (Outcome.FAILED, STEPS - 1)
    assert "Target 99 is out of bounds" in str(bad.error)
    assert not any(isinstance(event, GroupFellBack) for event in events)
    for job, result in zip(made, results, strict=True):
        if result is not bad:
            assert_alone(job, result)


def test_a_device_that_is_full_in_one_panel_loses_nobodys_steps(
    of_three: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Members of all panels go on from where each of them stood."""
    left = [torch.OutOfMemoryError("no room for so many")]

    def fill(program: Program, steps: int) -> None:
        if left and program.at == 1 and len(program._panels) == 3 and steps > 1:
            raise left.pop()

    watch(monkeypatch, fill)
    made = jobs()
    results, events = train(made, strategy="auto")
    (fell,) = [event for event in events if isinstance(event, GroupFellBack)]
    assert "2 groups of about 4, 8 of 8 from where they stood" in fell.reason
    assert not left
    for job, result in zip(made, results, strict=True):
        assert_alone(job, result)


@pytest.fixture
def repacked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever members have ended, whether or not it pays."""
    monkeypatch.setattr("carpool.executors.driver.repacked", lambda width, active, *_: active)


@pytest.mark.usefixtures("repacked_at_once")
def test_a_stack_that_is_repacked_has_panels_of_its_new_width(of_three: list[int]):
    made = [replace(job, epochs=1 if number % 2 else 3) for number, job in enumerate(jobs(10))]
    results, events = train(made)
    (resized,) = [event for event in events if isinstance(event, GroupResized)]
    assert (resized.old_width, resized.new_width) == (12, 6), "panels are alike, so there are rows to spare"
    for job, result in zip(made, results, strict=True):
        assert_alone(job, result)


@pytest.mark.usefixtures("repacked_at_once")
def test_a_stack_is_not_repacked_while_panels_behind_the_one_that_ended_are_still_to_be_told_of(
    of_three: list[int],
):
    """The first panel's members end in the chunk in which one of the second panel's raises."""
    x, y = data()
    spoiled = y.clone()
    spoiled[int(carpool.batch_order(BAD, 0, len(y))[-1])] = 99
    made = [replace(job, epochs=1 if number < 3 else 3) for number, job in enumerate(jobs())]
    made[BAD] = replace(made[BAD], data=(x, spoiled))
    results, events = train(made)
    assert [result.name for result in results.failed] == [f"m{BAD}"]
    assert results[BAD].steps == STEPS - 1
    assert any(isinstance(event, GroupResized) for event in events)
    for job, result in zip(made, results, strict=True):
        if result is not results[BAD]:
            assert_alone(job, result)


class Inverted(nn.Module):
    """Cannot compute anything with weights of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.eye(6, dtype=torch.float64))
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x @ torch.linalg.inv(self.mixed))


def test_rows_to_spare_hold_what_can_be_computed_with(of_three: list[int]):
    made = jobs(5, make=Inverted)
    results, events = train(made)
    assert not any(isinstance(event, GroupFellBack) for event in events)
    for job, result in zip(made, results, strict=True):
        assert_alone(job, result)


def test_a_check_that_raises_leaves_every_panel_as_it_was(
    of_three: list[int], monkeypatch: pytest.MonkeyPatch
):
    session, chunk = opened(jobs(9))
    session.check(chunk, chunk.rows)
    before = {name: session._tensors[name].clone() for name in session._tensors if stack.is_state(name)}

    def fail(program: Program, steps: int) -> None:
        if program.at == 2:
            raise RuntimeError("no")

    watch(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="no"):
        session.check(chunk, chunk.rows)
    for name, tensor in before.items():
        assert torch.equal(session._tensors[name], tensor), name
    session.close()


def test_predictions_are_of_members_and_not_of_rows_to_spare(of_three: list[int]):
    session, _ = opened(jobs(5))
    assert session.width == 6
    x, _ = data()
    assert session.predict(x).shape == (5, len(x), 3)
    session.close()


def test_members_that_read_the_same_are_one_panel(of_three: list[int]):
    """What they have in common is computed once."""
    made = [replace(job, seed=0) for job in jobs(4)]
    train(made)
    assert set(of_three) == {0}


def test_a_gpu_has_no_panels(of_three: list[int]):
    adapter, made = TorchAdapter(), jobs()
    for job in made:
        adapter.describe(job)
    known = [adapter._stacker._known(job) for job in made]
    recipe = adapter._stacker._recipe(known, len(known))
    assert panels.panels_of(known[0], recipe, 8, "cuda:0") == Panels(1, 8)
    assert panels.panels_of(known[0], recipe, 8, "cpu") == Panels(3, 3)


def test_a_large_member_has_a_panel_to_itself_and_a_small_one_does_not(monkeypatch: pytest.MonkeyPatch):
    """By the cache's size, whatever this machine has."""
    monkeypatch.setattr(panels, "cache_bytes", lambda threads: 1 << 20)

    def cut(width: int) -> Panels:
        made = jobs(2, make=lambda: nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3)).double())
        adapter = TorchAdapter()
        for job in made:
            adapter.describe(job)
        known = [adapter._stacker._known(job) for job in made]
        return panels.panels_of(known[0], adapter._stacker._recipe(known, 2), 2, "cpu")

    assert cut(8) == Panels(1, 2)
    assert cut(8192) == Panels(2, 1)


def test_a_launch_is_timed_without_a_trace_where_an_epoch_is_one_batch(of_three: list[int]):
    """Each panel twice, from the beginning of its orders: there is no second batch to read."""
    session, chunk = opened(jobs(9, batch_size=16 * STEPS))
    session._feed.tell(chunk, 1)
    before = {name: tensor.clone() for name, tensor in session._tensors.items()}
    assert session._train_program(16 * STEPS).launch_s() > 0
    for name, tensor in session._tensors.items():
        assert torch.equal(tensor, before[name]), name
    session.close()
