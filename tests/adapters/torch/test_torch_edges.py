"""Places where a stack could differ from the job alone in silence: each is refused, said, or made equal."""

import sys
import types
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool.errors import StepError
from carpool.result import Outcome, Results

X = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SGD = partial(torch.optim.SGD, lr=0.05)


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def jobs(make=net, count: int = 3, **options) -> list[carpool.Job]:
    settings = {"loss": F.mse_loss, "optimizer": SGD, "batch_size": 8, "epochs": 3, "data": (X, Y), **options}
    data = settings.pop("data")
    return [carpool.Job(make, data, name=f"m{seed}", seed=seed, **settings) for seed in range(count)]


def run(group: list[carpool.Job], strategy: str = "auto") -> Results:
    return carpool.train(group, device="cpu", compile=False, reporters=[], strategy=strategy)


def assert_as_alone(make_jobs, strategy: str = "fused") -> Results:
    together, alone = run(make_jobs(), strategy), run(make_jobs(), "in_turn")
    for one, other in zip(together, alone, strict=True):
        assert one.outcome is other.outcome
        assert one.history.keys() == other.history.keys()
        for metric, values in other.history.items():
            assert one.history[metric] == pytest.approx(values, rel=1e-9, abs=1e-12), metric
        for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    return together


def reason(group: list[carpool.Job]) -> str:
    plan = carpool.plan(group, device="cpu")
    assert {part.strategy for part in plan.groups} == {"interleaved"}
    return plan.groups[0].reason


# Refused, with the reason


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_not_stacked(register):
    def hooked() -> nn.Module:
        made = net()
        getattr(made[0].weight, register)(lambda grad: None)
        return made

    assert "'0.weight' has a gradient hook" in reason(jobs(hooked))


def test_two_parameters_in_one_memory_are_not_stacked():
    def shared() -> nn.Module:
        made: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
        made[1].weight = nn.Parameter(made[0].weight.data)
        return made

    assert "'0.weight' and '1.weight' are two tensors in one memory" in reason(jobs(shared))


class Averaging(nn.Module):
    """A target that follows by hand, as a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()
        self.target = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        made = self.layer(x)
        with torch.no_grad():
            self.target.mul_(0.9).add_(0.1 * made.mean(0))
        return made - self.target


def test_a_forward_pass_that_writes_into_a_parameter_is_not_stacked():
    assert "writes into the parameter 'target'" in reason(jobs(Averaging))
    assert_as_alone(lambda: jobs(Averaging), strategy="auto")


class Counting(nn.Module):
    """A forward pass that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 2).double(), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * (1.0 if self.calls < 6 else 0.5)


def test_a_forward_pass_that_changes_its_module_is_not_stacked_nor_disturbed_by_planning():
    live = Counting()
    group = [
        *jobs(Counting),
        carpool.Job(live, (X, Y), loss=F.mse_loss, optimizer=SGD, batch_size=8, epochs=3),
    ]
    assert "its forward pass changes 'model.calls'" in reason(group)
    assert live.calls == 0


# Said


@pytest.mark.parametrize("change", ["weights", "rate of dropout"])
def test_a_callback_that_changes_the_model_of_a_fused_job_fails_that_job(change):
    def dropping() -> Any:
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 2)).double()

    live = dropping()

    def meddle(event) -> None:
        if change == "weights":
            with torch.no_grad():
                live[0].weight.mul_(0.5)
        else:
            live[1].p = 0.5

    own = carpool.Job(
        live, (X, Y), name="own", loss=F.mse_loss, optimizer=SGD, batch_size=8, epochs=3, callbacks=[meddle]
    )
    results = run([own, *jobs(dropping)])
    assert results["own"].outcome is Outcome.FAILED
    assert isinstance(results["own"].error, StepError)
    assert ("weights or buffers" if change == "weights" else "'1.p'") in str(results["own"].error)
    assert results["m1"].outcome is Outcome.COMPLETED


# Made equal


def test_a_callback_may_set_hyper_parameters():
    def group() -> list[carpool.Job]:
        made = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = net()
            optimizer = SGD(model.parameters())

            def halve(event, optimizer=optimizer) -> None:
                optimizer.param_groups[0]["lr"] *= 0.5

            made.append(
                carpool.Job(
                    model,
                    (X, Y),
                    name=f"m{seed}",
                    loss=F.mse_loss,
                    optimizer=optimizer,
                    batch_size=8,
                    epochs=3,
                    callbacks=[halve],
                )
            )
        return made

    assert assert_as_alone(group)[0].optimizer.param_groups[0]["lr"] == 0.05 / 8


def named_step(model: nn.Module, batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def test_validation_data_in_another_order_of_keys():
    square = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def make() -> nn.Module:
        return nn.Linear(4, 4).double()

    options = {
        "data": {"x": X, "y": square},
        "validation_data": {"y": square, "x": X},
        "loss": None,
        "step": named_step,
    }
    assert_as_alone(lambda: jobs(make, **options))


def noisy_step(model: nn.Module, batch) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x + 0.3 * torch.randn_like(x)), y)


def test_random_numbers_in_validation_differ_by_batch_and_equal_the_job_alone():
    assert_as_alone(lambda: jobs(loss=None, step=noisy_step, validation_data=(X, Y)))


def moody_step(model: nn.Module, batch) -> dict[str, torch.Tensor]:
    x, y = batch
    made = model(x)
    extra = {"train_only": made.mean()} if model.training else {"eval_only": made.square().mean()}
    return {**extra, "loss": F.mse_loss(made, y)}


def test_metrics_may_depend_on_the_mode_and_the_loss_need_not_come_first():
    results = assert_as_alone(lambda: jobs(loss=None, step=moody_step, validation_data=(X, Y)))
    assert set(results[0].history) == {"loss", "train_only", "val_loss", "val_eval_only"}


def test_a_batch_shape_that_one_member_cannot_run_fails_that_member_alone():
    """BatchNorm cannot train on one sample: only the member with such a tail meets it."""

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()

    seen: list[int] = []
    group = jobs(normed, index=range(16), callbacks=[lambda event: seen.append(event.epoch)])
    group[2] = jobs(normed, index=range(17))[2]
    results = run(group)
    assert [result.outcome for result in results] == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.FAILED]
    assert {result.strategy for result in results} == {"fused"}
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


def test_settings_of_a_users_module_are_read_anew(monkeypatch):
    """A step remembered from an earlier run must not be used after a global it reads was changed."""
    source = "import torch\nTHRESHOLD = -9.0\ndef share(p, t):\n    return (p > THRESHOLD).double().mean()\n"
    module = types.ModuleType("users_module")
    monkeypatch.setitem(sys.modules, "users_module", module)
    exec(source, module.__dict__)
    module.share.__module__ = "users_module"
    assert run(jobs(metrics={"share": module.share}))[0].history["share"][0] == 1.0
    module.THRESHOLD = 9.0  # type: ignore[attr-defined]
    assert run(jobs(metrics={"share": module.share}))[0].history["share"][0] == 0.0


def test_optimizers_without_state_stay_without():
    for result in assert_as_alone(jobs):
        assert result.optimizer.state_dict()["state"] == {}


def test_old_gradients_do_not_survive_a_run():
    models = [net() for _ in range(2)]
    for model in models:
        model(X).sum().backward()
    group = [
        carpool.Job(model, (X, Y), name=f"g{i}", loss=F.mse_loss, optimizer=SGD, batch_size=8)
        for i, model in enumerate(models)
    ]
    run(group, "fused")
    assert all(parameter.grad is None for model in models for parameter in model.parameters())


def test_a_step_traced_under_autocast_is_not_used_outside_it():
    """In float32: autocast leaves float64 alone, so the other models here would not notice."""

    def group() -> list[carpool.Job]:
        return jobs(lambda: net().float(), data=(X.float(), Y.float()))

    with torch.autocast("cpu", torch.bfloat16):
        run(group())
    together, alone = run(group(), "fused"), run(group(), "in_turn")
    for one, other in zip(together, alone, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-5)
