"""`train` and `plan` from outside: misuse, failures, interruption, and all that must stay as it was."""

from __future__ import annotations

import copy
import os
import signal
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from begun import assert_nothing_ran
from carpool.errors import (
    DataError,
    DeviceError,
    FusionError,
    LossError,
    ModelError,
    OptimizerError,
    OptionError,
)
from carpool.events import (
    EpochEnded,
    Event,
    GroupFellBack,
    GroupResized,
    JobEnded,
    JobFailed,
    PreparationBegan,
    RunEnded,
    RunStarted,
)
from patience import PATIENCE_S

X, Y = torch.randn(12, 4, generator=torch.manual_seed(1)), torch.randn(12, 1, generator=torch.manual_seed(2))
SGD = partial(torch.optim.SGD, lr=0.01)


def net() -> nn.Module:
    return nn.Linear(4, 1)


def job(**options: Any) -> carpool.Job:
    """Three batches of 4, two epochs."""
    settings: dict[str, Any] = {
        "model": net, "data": (X, Y), "loss": F.mse_loss, "optimizer": SGD, "batch_size": 4, "epochs": 2,
    }  # fmt: skip
    settings |= options
    return carpool.Job(settings.pop("model"), settings.pop("data"), **settings)


def train(*jobs: carpool.Job, **options: Any) -> carpool.Results:
    return carpool.train(jobs, **{"device": "cpu", "reporters": [], "compile": False, **options})


def outcomes(results: carpool.Results) -> dict[str, str]:
    return {result.name: result.outcome.word for result in results}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Fussy(nn.Module):
    """A linear layer that raises when it is given a NaN, and cannot be traced for that."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ArithmeticError("a NaN in the data")
        return self.fc(x)


def with_nan(place: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = X.clone()
    x[place] = torch.nan
    return x, Y


# Misuse: refused before anything runs


def test_two_jobs_may_not_share_a_model():
    model = net()
    before = weights(model)
    with pytest.raises(ModelError, match="one Linear in 'a' and 'b'"):
        train(job(name="a", model=model), job(name="b", model=model))
    assert same(weights(model), before)


def test_two_jobs_may_not_share_an_optimizer():
    model, other = net(), net()
    optimizer = SGD(model.parameters())
    with pytest.raises(OptimizerError, match=r"Job 'b'.*this job's model's parameters"):
        train(
            job(name="a", model=model, optimizer=optimizer), job(name="b", model=other, optimizer=optimizer)
        )


def test_an_optimizer_must_be_over_the_jobs_own_model():
    with pytest.raises(OptimizerError, match="2 parameters that are not the model's"):
        train(job(model=net(), optimizer=SGD(net().parameters())))


def test_an_optimizer_is_needed():
    with pytest.raises(OptimizerError, match="Job 'a': Expected an optimizer"):
        train(job(name="a", optimizer=None))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": (X[:0], Y[:0])}, "at least one sample as data"),
        ({"data": (X, Y[:-1])}, r"lengths \[12, 11\]"),
        ({"index": [0, 12]}, r"index within 0\.\.11\. Received: 0\.\.12"),
        ({"index": np.zeros(12, bool)}, "at least one sample in index"),
        ({"validation_data": (X, Y[:-1])}, "arrays of one length as validation_data"),
    ],
    ids=["empty", "lengths", "index", "mask of nothing", "validation"],
)
def test_data_is_checked(options: dict[str, Any], says: str):
    with pytest.raises(DataError, match=says):
        train(job(**options))


def _unreduced(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction - target) ** 2


@pytest.mark.parametrize("models", [[net], [net, net], [net, lambda: nn.Linear(4, 1, bias=False)]])
@pytest.mark.parametrize("strategy", ["auto", "in_turn"])
def test_a_loss_that_is_no_scalar_is_refused_before_anything_runs(models: list[Any], strategy: str):
    heard: list[Event] = []
    jobs = [job(model=model, loss=_unreduced) for model in models]
    with pytest.raises(LossError, match=r"loss to be a scalar\. Received: shape \(4, 1\)"):
        train(*jobs, strategy=strategy, reporters=[heard.append])
    assert_nothing_ran(heard)


def test_one_bad_loss_refuses_the_run_and_leaves_the_sound_job_untouched():
    model = net()
    before = weights(model)
    with pytest.raises(LossError, match="Job 'bad'"):
        train(job(name="good", model=model), job(name="bad", loss=_unreduced))
    assert same(weights(model), before)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "", "CPU"])
def test_a_device_must_exist(device: str):
    with pytest.raises(DeviceError, match="Expected a device out of auto, cpu"):
        train(job(), device=device)


@pytest.mark.parametrize(
    "options", [{"strategy": "fast"}, {"on_error": "ignore"}, {"compile": "maybe"}, {"reporters": "loud"}]
)
def test_options_are_checked_before_anything_runs(options: dict[str, Any]):
    model = net()
    before = weights(model)
    with pytest.raises(OptionError):
        train(job(model=model), **options)
    assert same(weights(model), before)


# Fused that was asked for


def test_fused_that_cannot_be_names_the_layer_that_differs():
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def wider() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    jobs = [job(name="a", model=wide), job(name="b", model=wide), job(name="c", model=wider)]
    with pytest.raises(
        FusionError, match=r"Cannot fuse 'c': .*differs from 'a': '0.*\b32\b.*expected.*\b16\b"
    ):
        train(*jobs, strategy="fused")


def test_fused_for_what_cannot_be_stacked_names_the_users_line():
    def careful(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        return loss if loss.item() > 0 else loss * 2

    jobs = [job(loss=None, step=careful, seed=seed) for seed in range(2)]
    with pytest.raises(FusionError, match=r"test_train\.py:\d+: return loss if loss\.item\(\) > 0"):
        train(*jobs, strategy="fused")
    assert set(outcomes(train(*jobs)).values()) == {"completed"}


def test_fused_for_one_job_is_refused():
    with pytest.raises(FusionError, match="no other job has its structure"):
        train(job(), strategy="fused")


# Failures


def test_one_job_that_fails_is_a_value():
    results = train(job(name="bad", model=Fussy, data=with_nan(0)), job(name="good"))
    assert outcomes(results) == {"bad": "failed", "good": "completed"}
    assert isinstance(results["bad"].error, ArithmeticError)
    assert [r.name for r in results.failed] == ["bad"]
    assert results["good"].error is None


def test_a_factory_that_raises_is_its_own_jobs_failure():
    def broken() -> nn.Module:
        raise FileNotFoundError("no weights here")

    results = train(job(name="bad", model=broken, config={"lr": 1}), job(name="good"))
    assert outcomes(results) == {"bad": "failed", "good": "completed"}
    assert isinstance(results["bad"].error, FileNotFoundError)
    assert (results["bad"].config, results["bad"].model, results["bad"].steps) == ({"lr": 1}, None, 0)


def test_when_every_job_fails_the_first_error_is_raised():
    def broken() -> nn.Module:
        raise FileNotFoundError("no weights here")

    with pytest.raises(FileNotFoundError, match="no weights here"):
        train(job(name="a", model=broken), job(name="b", model=Fussy, data=with_nan(0)))


def test_divergence_is_not_an_error():
    results = train(job(name="a", data=with_nan(0)), job(name="b", data=with_nan(0)))
    assert outcomes(results) == {"a": "diverged", "b": "diverged"}


def test_on_error_raise_raises_at_the_first():
    heard: list[Event] = []
    bad, later = job(name="bad", model=Fussy, data=with_nan(0)), job(name="later")
    with pytest.raises(ArithmeticError, match="a NaN in the data"):
        train(bad, later, on_error="raise", reporters=[heard.append])
    assert [event.name for event in heard if isinstance(event, JobFailed | JobEnded)] == ["bad", "bad"]


def test_a_job_that_fails_late_holds_what_it_reached():
    """Without shuffling, its data raises in the third batch."""
    result = train(job(name="bad", model=Fussy, data=with_nan(11), shuffle=False), job(name="good"))["bad"]
    assert (result.outcome.word, result.steps, dict(result.history)) == ("failed", 2, {})
    alone = train(job(name="bad", model=Fussy, data=(X[:8], Y[:8]), shuffle=False, epochs=1))["bad"]
    assert same(weights(result.model), weights(alone.model))


@pytest.mark.parametrize("strategy", ["auto", "in_turn"])
def test_a_job_whose_validation_raises_fails_alone(strategy: str):
    bad = job(name="bad", model=lambda: nn.Linear(4, 1, bias=False), validation_data=(X[:, :3], Y))
    assert outcomes(train(bad, job(name="good"), strategy=strategy)) == {"bad": "failed", "good": "completed"}


def test_a_group_that_falls_back_in_the_middle_ends_where_its_jobs_end_alone(monkeypatch: pytest.MonkeyPatch):
    from carpool.adapters.torch.fused import StackedSession

    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    jobs = [job(name=name, seed=seed, scheduler=halving, epochs=4) for seed, name in enumerate("ab")]
    alone = train(*jobs, strategy="in_turn")
    launched: list[int] = []
    whole = StackedSession.advance

    def breaking(self: StackedSession, chunk: Any) -> Any:
        launched.append(chunk.steps)
        if len(launched) == 3:
            raise RuntimeError("a launch that failed")
        return whole(self, chunk)

    monkeypatch.setattr(StackedSession, "advance", breaking)
    heard: list[Event] = []
    broken = train(*jobs, reporters=[heard.append])
    assert any(isinstance(event, GroupFellBack) for event in heard)
    for one, other in zip(broken, alone, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-4)


def test_a_group_that_is_repacked_keeps_every_members_own_samples(monkeypatch: pytest.MonkeyPatch):
    from carpool.adapters.torch.fused import StackedSession

    monkeypatch.setattr(StackedSession, "timing", lambda self: (1.0, 0.0))
    heard: list[Event] = []
    jobs = [
        job(name=str(i), index=range(4 * i, 4 * i + 4), epochs=(1, 1, 30)[i], seed=i, batch_size=2)
        for i in range(3)
    ]
    together = train(*jobs, strategy="fused", reporters=[heard.append])
    assert any(isinstance(event, GroupResized) for event in heard)
    for one, other in zip(together, train(*jobs, strategy="in_turn"), strict=True):
        torch.testing.assert_close(one.model.weight, other.model.weight)


# Ctrl-C


def ctrl_c(event: Event) -> None:
    if isinstance(event, EpochEnded) and event.epoch == 0:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("by", ["callback", "reporter"])
def test_ctrl_c_raises_with_what_was_reached(by: str):
    def reporter(event: Event) -> None:
        if by == "reporter" and isinstance(event, EpochEnded) and event.name == "a":
            ctrl_c(event)

    live = net()
    jobs = [
        job(name="a", model=live, callbacks=[ctrl_c] if by == "callback" else [], epochs=50),
        job(name="b", epochs=50),
        job(name="later", model=lambda: nn.Linear(4, 1, bias=False), epochs=50),
    ]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(carpool.Interrupted) as caught:
        train(*jobs, reporters=[reporter])
    results = caught.value.results
    assert outcomes(results) == dict.fromkeys(["a", "b", "later"], "interrupted")
    epochs = len(results["b"].history["loss"])
    assert 1 <= epochs < 10
    assert results["a"].steps == results["b"].steps == 3 * epochs
    assert results["a"].model is live
    assert results["later"].steps < 3 * 50
    assert signal.getsignal(signal.SIGINT) is before
    alone = train(job(name="b", epochs=epochs), strategy="in_turn")["b"]
    torch.testing.assert_close(results["b"].model.weight, alone.model.weight)
    assert results["b"].history["loss"] == pytest.approx(alone.history["loss"], rel=1e-4)


def test_ctrl_c_after_one_group_keeps_its_results():
    jobs = [job(name="a"), job(name="b", model=lambda: nn.Linear(4, 1, bias=False), callbacks=[ctrl_c])]
    with pytest.raises(carpool.Interrupted) as caught:
        train(*jobs, strategy="in_turn")
    assert outcomes(caught.value.results) == {"a": "completed", "b": "interrupted"}


# What stays as it was


class Settings:
    """Everything global that a run could have moved."""

    def __init__(self) -> None:
        self.values = {
            "torch's generator": torch.get_rng_state().tolist(),
            "numpy's generator": np.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
            "default dtype": torch.get_default_dtype(),
            "threads": (torch.get_num_threads(), threading.active_count()),
            "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "warnings": list(warnings.filters),
            "flags": (
                torch.get_float32_matmul_precision(),
                torch.backends.cudnn.allow_tf32,
                torch.backends.cudnn.benchmark,
                torch.are_deterministic_algorithms_enabled(),
            ),
            "signal": signal.getsignal(signal.SIGINT),
        }


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_nothing_global_changes(strategy: str):
    before = Settings()

    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    train(*(job(model=dropping, seed=s, validation_data=(X, Y)) for s in range(2)), strategy=strategy)
    assert Settings().values == before.values


def test_other_global_settings_are_respected_and_kept():
    torch.set_default_dtype(torch.float64)
    try:
        before = Settings()
        results = train(*(job(data=(X.double(), Y.double()), seed=s) for s in range(2)))
        assert Settings().values == before.values
    finally:
        torch.set_default_dtype(torch.float32)
    assert results[0].model.weight.dtype == torch.float64


def test_a_failing_run_changes_nothing_global_either():
    before = Settings()
    train(job(name="bad", model=Fussy, data=with_nan(0)), job(name="good"))
    assert Settings().values == before.values


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_the_data_stays_as_it_was(strategy: str):
    x, y = X.clone(), Y.clone()
    train(*(job(data=(x, y), seed=s) for s in range(2)), strategy=strategy)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


# Live objects


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_a_run_updates_the_objects_passed_and_the_next_goes_on(strategy: str):
    """Twice two epochs equal a hand-written loop over both, optimizer state and scheduler included."""
    models = [net().double(), net().double()]
    twins = copy.deepcopy(models)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    data = (X.double(), Y.double())
    jobs = [
        job(name=str(i), model=models[i], optimizer=optimizers[i], scheduler=schedulers[i], data=data, seed=i)
        for i in range(2)
    ]
    first = train(*jobs, strategy=strategy)
    middle = [weights(model) for model in models]
    second = train(*jobs, strategy=strategy)
    for i, twin in enumerate(twins):
        assert second[i].model is models[i]
        assert second[i].optimizer is optimizers[i]
        assert second[i].scheduler is schedulers[i]
        assert not same(middle[i], weights(models[i]))
        losses = plain_loop(twin, data, seed=i, runs=2)
        torch.testing.assert_close(models[i].weight, twin.weight, rtol=0, atol=1e-10)
        assert [*first[i].history["loss"], *second[i].history["loss"]] == pytest.approx(losses, rel=1e-9)
        assert optimizers[i].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**4)


def plain_loop(
    model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], seed: int, runs: int
) -> list[float]:
    """What a user would write without carpool: two epochs of three batches, so many times over."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for _ in range(runs):
        for epoch in range(2):
            order, total = carpool.batch_order(seed, epoch, 12), 0.0
            for batch in order.reshape(3, 4):
                optimizer.zero_grad()
                loss = F.mse_loss(model(data[0][batch]), data[1][batch])
                loss.backward()
                optimizer.step()
                total += loss.item() * 4
            scheduler.step()
            losses.append(total / 12)
    return losses


def test_modules_stay_in_the_mode_they_are_in():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 1))
    train(job(model=model, validation_data=(X, Y)))
    assert [module.training for module in model] == [True, False, True]


def test_a_factory_makes_the_same_model_under_the_same_seed():
    results = train(job(seed=3, name="a"), job(seed=3, name="b"), job(seed=4, name="c"))
    assert same(weights(results["a"].model), weights(results["b"].model))
    assert not same(weights(results["a"].model), weights(results["c"].model))


def test_a_grid_over_numpys_numbers_runs():
    jobs = carpool.grid(
        lambda lr, seed: job(optimizer=partial(torch.optim.SGD, lr=lr), seed=seed),
        lr=np.array([0.1, 0.01]),
        seed=np.arange(2),
    )
    results = train(*jobs)
    assert outcomes(results) == dict.fromkeys(
        ["lr=0.1,seed=0", "lr=0.1,seed=1", "lr=0.01,seed=0", "lr=0.01,seed=1"], "completed"
    )
    assert results["lr=0.01,seed=1"].config == {"lr": 0.01, "seed": 1}


# Reporters


def test_reporters_hear_the_run_from_start_to_end_and_are_closed():
    class Reporter:
        def __init__(self) -> None:
            self.heard: list[Event] = []
            self.closed = 0

        def __call__(self, event: Event) -> None:
            self.heard.append(event)

        def close(self) -> None:
            self.closed += 1

    reporter = Reporter()
    train(job(), job(seed=1), reporters=[reporter])
    preparations, (first, *_, last) = reporter.heard[:2], reporter.heard[2:]
    assert {type(event) for event in preparations} == {PreparationBegan}
    assert isinstance(first, RunStarted)
    assert (first.steps, first.device) == (12, "cpu")
    assert isinstance(last, RunEnded)
    assert reporter.closed == 1
    with pytest.raises(ArithmeticError):
        train(job(model=Fussy, data=with_nan(0)), on_error="raise", reporters=[reporter])
    assert reporter.closed == 2


def test_a_run_outside_the_main_thread_works():
    done: list[carpool.Results] = []
    thread = threading.Thread(target=lambda: done.append(train(job())))
    thread.start()
    thread.join(PATIENCE_S)
    assert outcomes(done[0]) == {"job-0": "completed"}


# Planning


def _plans() -> list[Callable[[carpool.Job], Any]]:
    return [
        lambda one: carpool.plan([one, job(name="other")], device="cpu"),
        lambda one: carpool.plan([one], device="cpu", strategy="in_turn"),
    ]


@pytest.mark.parametrize("make", _plans(), ids=["auto", "in_turn"])
def test_a_plan_runs_nothing(make: Callable[[carpool.Job], Any]):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    before, global_before = weights(model), Settings()
    rates, schedule = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(scheduler.state_dict())
    called: list[EpochEnded] = []
    make(job(name="a", model=model, optimizer=optimizer, scheduler=scheduler, callbacks=[called.append]))
    assert same(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.state_dict() == rates
    assert scheduler.state_dict() == schedule
    assert called == []
    assert Settings().values == global_before.values


def test_a_plan_says_what_train_would_do():
    made = carpool.plan([job(name="a"), job(name="b", seed=1), job(name="c", model=Fussy)], device="cpu")
    assert [(group.names, group.strategy) for group in made.groups] == [
        (("a", "b"), "fused"),
        (("c",), "interleaved"),
    ]
    assert made.device == "cpu"
    assert made.data_bytes == X.nbytes + Y.nbytes
    assert "group 0: fused, 2 jobs: a, b" in made.explain()


def test_a_plan_lists_what_cannot_run():
    def broken() -> nn.Module:
        raise FileNotFoundError("no weights here")

    made = carpool.plan([job(name="bad", model=broken), job(name="good")], device="cpu")
    assert made.explain().splitlines()[-1] == "cannot run: bad: FileNotFoundError: no weights here"


def test_a_plan_refuses_what_train_would_refuse():
    with pytest.raises(OptionError, match="Received: 'fast'"):
        carpool.plan([job()], strategy="fast")
    with pytest.raises(DeviceError):
        carpool.plan([job()], device="tpu")
    with pytest.raises(LossError):
        carpool.plan([job(loss=_unreduced)], device="cpu")


def test_a_reporter_that_raises_is_left_out_and_changes_nothing():
    def broken(event: object) -> None:
        raise ValueError("I cannot count")

    jobs = [job(name="a"), job(name="b", seed=1)]
    seen: list = []
    with pytest.warns(UserWarning, match="I cannot count.*goes on without it"):
        results = carpool.train(jobs, device="cpu", compile=False, reporters=[broken, seen.append])
    assert {result.strategy for result in results} == {"fused"}
    assert len(seen) > 5


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_gradients_are_taken_where_the_caller_switched_them_off(strategy: str):
    plain = carpool.train(
        [job(name="a"), job(name="b", seed=1)], device="cpu", compile=False, reporters=[], strategy=strategy
    )
    with torch.no_grad():
        off = carpool.train(
            [job(name="a"), job(name="b", seed=1)],
            device="cpu",
            compile=False,
            reporters=[],
            strategy=strategy,
        )
    assert off["b"].history == plain["b"].history


def test_two_jobs_may_not_share_a_layer():
    shared = nn.Linear(4, 1)
    with pytest.raises(ModelError, match="its own trainable parameters"):
        carpool.plan([job(name="a", model=nn.Sequential(shared)), job(name="b", model=nn.Sequential(shared))])
