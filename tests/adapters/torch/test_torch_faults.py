"""One bad member harms no other."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import mlp, plain_loop, plain_objects, shown, tables

import carpool
from carpool.errors import DataError
from carpool.events import GroupFellBack
from carpool.result import Outcome, Results
from carpool.testing.conformance import assert_close

MEMBERS = 64
BAD = 17


def double_mlp() -> nn.Module:
    return mlp().double()


def jobs(epochs: int = 3, **changes) -> list[carpool.Job]:
    sgd = torch.optim.SGD
    return [
        carpool.Job(
            double_mlp,
            tables(True)["vector"],
            name=f"m{i}",
            loss=F.cross_entropy,
            optimizer=partial(sgd, lr=0.01 + 0.001 * i),
            batch_size=16,
            epochs=epochs,
            seed=i,
            **changes,
        )
        for i in range(MEMBERS)
    ]


def assert_others_equal_their_solo_runs(group: list[carpool.Job], results: Results) -> None:
    for job, result in zip(group, results, strict=True):
        if job.name == f"m{BAD}":
            continue
        assert result.outcome is Outcome.COMPLETED
        got = shown(result.model, result.optimizer, result.history["loss"])
        assert_close(got, plain_loop(job, *plain_objects(job)), double=True)


def run(group: list[carpool.Job], events: list | None = None) -> Results:
    return carpool.train(
        group, device="cpu", compile=False, reporters=[events.append] if events is not None else []
    )


def test_a_member_whose_data_raises_fails_alone():
    def broken():
        raise OSError("the disk is gone")

    group = jobs()
    group[BAD] = replace(group[BAD], data=broken)
    results = run(group)
    assert results[BAD].outcome is Outcome.FAILED
    assert isinstance(results[BAD].error, OSError)
    assert_others_equal_their_solo_runs(group, results)


def test_a_member_whose_batch_raises_in_the_middle_fails_alone():
    """A label out of range raises inside the fused launch; the launch goes on without its row."""
    x, y = tables(True)["vector"]
    spoiled = y.clone()
    spoiled[int(carpool.batch_order(BAD, 0, len(y))[-1])] = 99
    group = jobs()
    group[BAD] = replace(group[BAD], data=(x, spoiled))
    events: list = []
    results = run(group, events)
    assert results[BAD].outcome is Outcome.FAILED
    error = results[BAD].error
    assert isinstance(error, DataError)
    assert isinstance(error.__cause__, IndexError)
    assert results[BAD].steps == 3, "the last batch of the first epoch is the one that raises"
    assert not any(isinstance(event, GroupFellBack) for event in events)
    assert all(result.strategy == "fused" for result in results)
    assert_others_equal_their_solo_runs(group, results)


def test_a_member_that_turns_nan_fails_alone_and_keeps_its_last_state():
    x, y = tables(True)["vector"]
    spoiled = x.clone()
    place = int(carpool.batch_order(BAD, 0, len(y))[20])  # in its second batch
    spoiled[place] = float("nan")
    group = jobs()
    group[BAD] = replace(group[BAD], data=(spoiled, y))
    results = run(group)
    bad = results[BAD]
    assert bad.outcome is Outcome.DIVERGED
    assert bad.steps == 1
    order = torch.from_numpy(carpool.batch_order(BAD, 0, len(y))[:16].copy())
    model, optimizer, _ = plain_objects(group[BAD])
    F.cross_entropy(model(x[order]), y[order]).backward()
    optimizer.step()
    for got, expected in zip(bad.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert_others_equal_their_solo_runs(group, results)


def test_nan_alone_is_the_same_as_nan_in_a_group():
    x, y = tables(True)["vector"]
    spoiled = x.clone()
    spoiled[5] = float("inf")
    group = [replace(job, data=(spoiled, y)) for job in jobs()[:3]]
    together, alone = run(group), carpool.train(group, device="cpu", strategy="in_turn", reporters=[])
    for one, other in zip(together, alone, strict=True):
        assert (one.outcome, one.steps) == (other.outcome, other.steps) == (Outcome.DIVERGED, one.steps)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_scheduler_that_raises_fails_its_own_member():
    short = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=100, cycle_momentum=False)
    group = jobs(scheduler=short)
    group[BAD] = replace(
        group[BAD],
        scheduler=partial(
            torch.optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=6, cycle_momentum=False
        ),
    )
    results = run(group)
    assert results[BAD].outcome is Outcome.FAILED
    assert "6" in str(results[BAD].error)
    assert_others_equal_their_solo_runs(group, results)


def test_a_diverged_members_scheduler_stands_where_its_steps_ended():
    x, y = tables(True)["vector"]
    spoiled = x.clone()
    spoiled[int(carpool.batch_order(BAD, 1, len(y))[20])] = float("nan")
    spoiled[int(carpool.batch_order(BAD, 0, len(y))[0])] = x[0, 0]
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=100, cycle_momentum=False)
    group = [replace(job, data=(spoiled, y)) for job in jobs(scheduler=cycle)[BAD : BAD + 2]]
    together = run(group)
    alone = carpool.train(group, device="cpu", strategy="in_turn", reporters=[])
    for one, other in zip(together, alone, strict=True):
        assert one.outcome is other.outcome is Outcome.DIVERGED
        assert one.scheduler.last_epoch == other.scheduler.last_epoch == one.steps
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(
            other.optimizer.param_groups[0]["lr"], rel=1e-12
        )


def test_a_callback_that_raises_fails_its_own_member():
    def complain(event):
        raise RuntimeError(f"I do not like epoch {event.epoch}")

    group = jobs()
    group[BAD] = replace(group[BAD], callbacks=[complain])
    results = run(group)
    assert results[BAD].outcome is Outcome.FAILED
    assert "epoch 0" in str(results[BAD].error)
    assert_others_equal_their_solo_runs(group, results)


def test_a_mismatch_at_the_first_step_falls_back_and_says_so(monkeypatch):
    """A fooled signature is caught by the check, not trained on."""
    from carpool.adapters.torch import behaviour as adapter

    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(6, 3), factor

        def forward(self, x):
            return self.layer(x) * self.factor

    monkeypatch.setattr(
        adapter,
        "model_signature",
        lambda model: tuple((n, tuple(p.shape)) for n, p in model.named_parameters()),
    )
    data = tables(True)["vector"]

    def job(factor: float) -> carpool.Job:
        optimizer = partial(torch.optim.SGD, lr=0.1)
        return carpool.Job(
            lambda: Scaled(factor).double(), data, loss=F.cross_entropy, optimizer=optimizer, epochs=2
        )

    events: list = []
    results = run([job(1.0), job(3.0)], events)
    fell = [event for event in events if isinstance(event, GroupFellBack)]
    assert len(fell) == 1
    assert "'job-1' differs from its step alone" in fell[0].reason
    assert [result.strategy for result in results] == ["interleaved", "interleaved"]
    for factor, result in zip((1.0, 3.0), results, strict=True):
        expected = carpool.train([job(factor)], device="cpu", reporters=[])[0]
        np.testing.assert_allclose(result.history["loss"], expected.history["loss"], rtol=1e-12)
    with pytest.raises(carpool.CarpoolError, match="cannot go on"):
        carpool.train([job(1.0), job(3.0)], device="cpu", strategy="fused", reporters=[])


def test_a_member_whose_validation_raises_fails_alone():
    x, y = tables(True)["vector"]
    spoiled = y.clone()
    spoiled[3] = 99
    group = jobs(validation_data=(x, y))
    group[BAD] = replace(group[BAD], validation_data=(x, spoiled))
    results = run(group)
    assert results[BAD].outcome is Outcome.FAILED
    assert "99 is out of bounds" in str(results[BAD].error)
    assert_others_equal_their_solo_runs(group, results)


@pytest.mark.parametrize("strategy", ["auto", "in_turn"])
def test_a_schedule_that_raises_at_the_end_of_an_epoch_fails_its_own_member(strategy):
    group = jobs(scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch))[
        :20
    ]
    group[BAD] = replace(
        group[BAD],
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: [1.0, 0.5][epoch]),
    )
    results = carpool.train(group, device="cpu", compile=False, reporters=[], strategy=strategy)
    assert results[BAD].outcome is Outcome.FAILED
    assert isinstance(results[BAD].error, IndexError)
    assert_others_equal_their_solo_runs(group, results)


def test_a_group_that_gives_up_in_the_middle_starts_its_members_from_the_start(monkeypatch):
    """A launch that fails for no row's own reason: schedulers that were stepped ahead are put back."""
    from carpool.adapters.torch.program import Program

    calls = []
    run_whole = Program.run

    def run_until_it_breaks(self, steps):
        calls.append(steps)
        if len(calls) == 6:
            raise RuntimeError("the driver reset the device")
        run_whole(self, steps)

    monkeypatch.setattr(Program, "run", run_until_it_breaks)
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=12, cycle_momentum=False)
    for scheduler in (halving, cycle):
        calls.clear()
        group = jobs(scheduler=scheduler)[:3]
        events: list = []
        results = run(group, events)
        assert any(isinstance(event, GroupFellBack) for event in events)
        assert "driver reset" in results[0].reason
        assert_others_equal_their_solo_runs(group, results)


def test_a_diverged_members_optimizer_has_counted_only_its_own_steps():
    """The driver runs ahead of what it has read: a frozen row must not take the counts of chunks it sat out."""
    x, y = tables(True)["vector"]
    spoiled = x.clone()
    spoiled[int(carpool.batch_order(BAD, 0, len(y))[20])] = float("nan")
    adam = partial(torch.optim.Adam, lr=1e-3)
    group = [replace(job, optimizer=adam) for job in jobs(epochs=5)[BAD : BAD + 3]]
    group[0] = replace(group[0], data=(spoiled, y))
    diverged = run(group)[0]
    assert (diverged.outcome, diverged.steps) == (Outcome.DIVERGED, 1)
    assert {float(state["step"]) for state in diverged.optimizer.state.values()} == {1.0}
