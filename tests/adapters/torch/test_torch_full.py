"""Devices that run full in the middle of a run: who did not fit goes on smaller or alone, and the others notice nothing."""

from functools import partial
from importlib import import_module
from signal import SIGINT, raise_signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool.adapters.torch.footprint import Live
from carpool.adapters.torch.fuse import TorchFuser
from carpool.adapters.torch.orders import Orders
from carpool.adapters.torch.program import Program
from carpool.errors import OutOfRoomError
from carpool.events import GroupFellBack
from carpool.result import Outcome

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def net(hidden=8):
    return nn.Sequential(
        nn.Linear(6, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3)
    )


def job(seed, hidden=8, **options):
    given: dict[str, Any] = {"loss": F.cross_entropy} | options
    optimizer = given.pop("optimizer", partial(torch.optim.Adam, lr=0.01))
    make = partial(net, hidden)
    return carpool.Job(
        make, (X, Y), name=str(seed), optimizer=optimizer, batch_size=8, epochs=4, seed=seed, **given
    )


def train(jobs, **options):
    seen = []
    given: dict[str, Any] = {"compile": False, "device": "cpu"} | options
    return carpool.train(jobs, reporters=[seen.append], **given), [
        e for e in seen if isinstance(e, GroupFellBack)
    ]


class Full:
    """A step that finds the device full at some of its calls."""

    def __init__(self, *at):
        self.at, self.calls = at, 0

    def __call__(self, model, batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        self.calls += 1
        if self.calls in self.at:
            raise torch.OutOfMemoryError("no room for 7 bytes")
        return loss


def plainly(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def assert_same(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert one.outcome is Outcome.COMPLETED, one.error
        assert one.history == other.history
        for key, value in other.model.state_dict().items():
            assert torch.equal(one.model.state_dict()[key], value), key


def test_a_job_alone_takes_the_step_again_and_its_neighbours_notice_nothing():
    full = Full(4, 11)  # the first call is the probe's
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    results, events = train(
        [job(0, 8, loss=None, step=full, scheduler=schedule), job(1, 9), job(2, 10)], strategy="interleaved"
    )
    expected, _ = train(
        [job(0, 8, loss=None, step=plainly, scheduler=schedule), job(1, 9), job(2, 10)],
        strategy="interleaved",
    )
    assert full.calls == 11
    assert [event.names for event in events] == [("0",)]
    assert "alone with the device, 1 of 1 from where they stood" in events[0].reason
    assert results["0"].outcome is Outcome.OUT_OF_MEMORY  # alone, and full once more
    assert_same([results["1"], results["2"]], [expected["1"], expected["2"]])


def test_a_job_that_was_full_once_ends_where_it_would_have_ended():
    results, events = train([job(0, 8, loss=None, step=Full(9)), job(1, 9)], strategy="interleaved")
    expected, _ = train([job(0, 8, loss=None, step=plainly), job(1, 9)], strategy="interleaved")
    assert len(events) == 1
    assert_same(results, expected)
    assert [result.steps for result in results] == [20, 20]


def test_one_that_never_fits_says_what_it_needs_and_what_there_was():
    results, _ = train([job(0, 8, loss=None, step=Full(*range(5, 100))), job(1, 9)], strategy="interleaved")
    assert results["0"].outcome is Outcome.OUT_OF_MEMORY
    assert isinstance(results["0"].error, OutOfRoomError)
    for words in (
        "Job '0': Expected room for about",
        "no room for 7 bytes, with",
        "available. Remedy: take smaller",
    ):
        assert words in str(results["0"].error)
    assert results["1"].outcome is Outcome.COMPLETED
    assert results.failed[0].name == "0"


class Updating(torch.optim.SGD):
    """An optimizer that finds the device full when it has updated some of its parameters."""

    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise torch.OutOfMemoryError("no room in the middle of an update")


def test_half_an_update_is_not_gone_on_from():
    results, _ = train(
        [job(0, 8, optimizer=lambda p: Updating(p, lr=0.1)), job(1, 9)], strategy="interleaved"
    )
    assert results["0"].outcome is Outcome.OUT_OF_MEMORY
    assert results["1"].outcome is Outcome.COMPLETED


@pytest.fixture
def full_at(monkeypatch):
    """Makes a stack's launch fail at a step when it is wider than some width."""

    def arrange(step, wider_than, half=False, kind="table"):
        real = Program.run
        taken = [0]

        def run(self, steps):
            wide = len(self._panels[0]["weights"]) > wider_than and ("table" in self._panels[0]) == (
                kind == "table"
            )
            for _ in range(steps):
                taken[0] += wide and bool(self._panels[0]["active"].any())
                if wide and taken[0] >= step:
                    self._begun = self._writes() - half
                    raise torch.OutOfMemoryError("no room for so many")
                real(self, 1)

        monkeypatch.setattr(Program, "run", run)

    return arrange


@pytest.mark.parametrize(
    ("half", "kept"), [pytest.param(False, "6 of 6", marks=pytest.mark.slow), (True, "0 of 6")]
)
def test_a_group_goes_on_in_halves(full_at, half, kept):
    def jobs():
        schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
        return [job(seed, scheduler=schedule, validation_data=(X, Y)) for seed in range(6)]

    expected, _ = train(jobs(), strategy="auto")
    full_at(step=8, wider_than=2, half=half)
    results, events = train(jobs(), strategy="auto")
    assert f"2 groups of about 3, {kept} from where they stood" in events[0].reason
    assert [len(event.names) for event in events] == [6, 3, 3]
    for one, other in zip(results, expected, strict=True):
        assert one.outcome is Outcome.COMPLETED
        assert one.steps == 20
        for metric in ("loss", "val_loss"):
            assert one.history[metric] == pytest.approx(other.history[metric], rel=1e-4)
        for key, value in other.model.state_dict().items():
            torch.testing.assert_close(one.model.state_dict()[key], value, rtol=1e-3, atol=1e-4)


def test_a_group_that_is_full_before_a_chunk_begins_has_lost_no_step_and_gained_none(monkeypatch):
    """While it is told what to run, say: what the chunk before counted is still there."""
    real, ahead = Orders.lay, [None, None, None, torch.OutOfMemoryError("no room for an order")]

    def lay(self, rows, epochs):
        if ahead and (error := ahead.pop(0)) is not None:
            raise error
        real(self, rows, epochs)

    expected, _ = train([job(seed) for seed in range(4)])
    monkeypatch.setattr(Orders, "lay", lay)
    results, events = train([job(seed) for seed in range(4)])
    assert "2 groups of about 2, 4 of 4 from where they stood" in events[0].reason
    for one, other in zip(results, expected, strict=True):
        assert (one.outcome, one.steps) == (Outcome.COMPLETED, 20)
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-4)


def test_a_group_full_in_validation_starts_again_in_halves(full_at):
    full_at(step=3, wider_than=2, kind="validation")
    results, events = train([job(seed, validation_data=(X, Y)) for seed in range(4)])
    assert "2 groups of about 2, 0 of 4 from where they stood" in events[0].reason
    assert {(result.outcome, result.steps) for result in results} == {(Outcome.COMPLETED, 20)}
    assert {len(result.history["val_loss"]) for result in results} == {4}


def test_a_group_that_cannot_be_opened_is_opened_in_halves(monkeypatch):
    real = TorchFuser.open

    def opened(self, jobs, width, device, prepared=lambda *_: None):
        if width > 2:
            raise torch.OutOfMemoryError("no room to open")
        return real(self, jobs, width, device, prepared)

    monkeypatch.setattr(TorchFuser, "open", opened)
    results, events = train([job(seed) for seed in range(4)])
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert "2 groups of about 2, 0 of 4 from where they stood" in events[0].reason


def test_a_group_too_wide_for_a_simulated_device_shrinks_until_it_fits():
    def wide(seed):
        make = lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))  # noqa: E731
        data = (torch.randn(32, 64), torch.randint(0, 10, (32,)))
        optimizer = partial(torch.optim.Adam, lr=0.01)
        return carpool.Job(make, data, name=str(seed), loss=F.cross_entropy, optimizer=optimizer, seed=seed)

    with Live() as free:
        expected, _ = train([wide(seed) for seed in range(12)], strategy="auto")
    with Live(capacity_bytes=free.peak_bytes * 2 // 3):
        results, events = train([wide(seed) for seed in range(12)], strategy="auto")
    assert events
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert len(expected) == len(results)


class Once:
    """A function that finds the device full at one of its calls."""

    def __init__(self, real, at):
        self._real, self._at, self.calls = real, at, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self._at:
            raise torch.OutOfMemoryError("no room here")
        return self._real(*args, **kwargs)


def pair(**options):
    return [job(0, 8, **options), job(1, 9)]


def test_a_fused_kernel_that_may_have_written_is_not_run_again(monkeypatch):
    """Torch counts no writes of fused kernels, which jobs on a CPU use."""
    sgd = import_module("torch.optim.sgd")
    monkeypatch.setattr(sgd, "_fused_sgd", Once(sgd._fused_sgd, 5))
    results, _ = train(pair(optimizer=partial(torch.optim.SGD, lr=0.1)), strategy="interleaved")
    assert results["0"].outcome is Outcome.OUT_OF_MEMORY
    assert results["1"].outcome is Outcome.COMPLETED


def test_buffers_are_counted_once_when_clipping_found_no_room(monkeypatch):
    from carpool.adapters.torch import solo

    expected, _ = train(pair(clip_norm=1.0), strategy="interleaved")
    once = Once(solo.clip_grad_norm_, 5)
    monkeypatch.setattr(solo, "clip_grad_norm_", once)
    results, events = train(pair(clip_norm=1.0), strategy="interleaved")
    assert once.calls == 21
    assert len(events) == 1
    assert_same(results, expected)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_optimizer_that_found_no_room_for_its_state_makes_it_again(monkeypatch, at):
    kind = partial(torch.optim.Adam, lr=0.01, foreach=True)  # as on a GPU: without fused kernels
    expected, _ = train(pair(optimizer=kind), strategy="interleaved")
    monkeypatch.setattr(torch, "zeros_like", Once(torch.zeros_like, at))
    results, events = train(pair(optimizer=kind), strategy="interleaved")
    monkeypatch.undo()
    assert len(events) <= 1
    assert_same(results, expected)


def test_who_is_given_up_holds_what_it_had_reached():
    results, _ = train([job(0, 8, loss=None, step=Full(*range(15, 200))), job(1, 9)], strategy="interleaved")
    assert results["0"].outcome is Outcome.OUT_OF_MEMORY
    assert results["0"].steps == 13  # the first call was the probe's, the fifteenth found no room
    assert len(results["0"].history["loss"]) == 2


def test_phases_that_sit_out_are_not_gone_on_from():
    def phases(step):
        def optimizer(parameters):
            return torch.optim.SGD(parameters, lr=0.1)

        return [
            carpool.Phase(step, optimizer, name="often"),
            carpool.Phase(plainly, optimizer, name="seldom", every=3),
        ]

    options = {"loss": None, "optimizer": None}
    results, _ = train([job(0, 8, phases=phases(Full(9)), **options), job(1, 9)], strategy="interleaved")
    assert results["0"].outcome is Outcome.OUT_OF_MEMORY
    assert results["1"].outcome is Outcome.COMPLETED


def test_a_result_that_cannot_be_written_home_is_its_own_failure(monkeypatch):
    from carpool.adapters.torch import absorb

    monkeypatch.setattr(absorb, "_owned", Once(absorb._owned, 4))
    results, events = train([job(seed) for seed in range(3)], strategy="fused")
    assert not events
    assert [result.outcome for result in results].count(Outcome.FAILED) == 1
    assert {result.steps for result in results} == {20}


def test_ctrl_c_keeps_what_those_had_reached_that_wait_for_the_device(full_at):
    full_at(step=8, wider_than=2)
    jobs = [job(seed) for seed in range(4)]

    def stop(event):
        if isinstance(event, GroupFellBack):
            raise_signal(SIGINT)

    with pytest.raises(carpool.Interrupted) as caught:
        carpool.train(jobs, device="cpu", reporters=[stop], compile=False)
    assert {result.outcome for result in caught.value.results} == {Outcome.INTERRUPTED}
    assert all(result.steps >= 5 and result.model is not None for result in caught.value.results)
