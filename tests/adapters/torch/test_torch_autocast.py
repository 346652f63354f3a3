"""`precision=`: forward pass and loss under autocast, alone and fused; weights and optimizer keep their type."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import batch_norm, built_conv, conv_norm, dropout, layer_norm, mlp, tables

import carpool
from carpool.adapters.torch import compare, differences, precision, verify
from carpool.adapters.torch.compare import tolerance
from carpool.errors import FusionError, OptionError
from carpool.fidelity import LOW, SINGLE

X, Y = tables(False)["vector"]


def num_bytes(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What an element of the prediction takes: the type that the model computed in."""
    return torch.full((), float(prediction.element_size()))


def job(precision: str, seed: int = 0, make: Callable[[], nn.Module] = mlp, **changes) -> carpool.Job:
    data = tables(False)["image"] if make in (built_conv, conv_norm) else (X, Y)
    settings = {
        "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "metrics": {"num_bytes": num_bytes},
        "validation_data": data,
        "batch_size": 16,
        "epochs": 3,
    }
    return carpool.Job(
        make, data, name=f"{precision}-{seed}", seed=seed, precision=precision, **settings | changes
    )


def train(jobs, strategy: str) -> carpool.Results:
    return carpool.train(jobs, strategy=strategy, device="cpu", compile=False, reporters=[])


def by_hand(seed: int, lowered: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        for rows in torch.from_numpy(carpool.batch_order(seed, epoch, len(X))).split(16):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
                loss = F.cross_entropy(model(X[rows]), Y[rows])
            loss.backward()
            optimizer.step()
    return model


def gap(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("precision", "lowered"), [("bf16", True), ("float32", False), ("inherit", False)])
def test_a_job_alone_equals_a_loop_under_autocast(precision: str, lowered: bool):
    (result,) = train([job(precision, 1)], "in_turn")
    assert gap(result.model, by_hand(1, lowered)) <= 1e-5
    assert gap(result.model, by_hand(1, not lowered)) > 1e-4
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("make", [mlp, batch_norm, layer_norm, built_conv, conv_norm, dropout])
def test_fused_and_alone_agree_in_bf16(make: Callable[[], nn.Module]):
    fused = train([job("bf16", seed, make) for seed in range(3)], "fused")
    alone = train([job("bf16", seed, make) for seed in range(3)], "in_turn")
    for one, other in zip(fused, alone, strict=True):
        assert gap(one.model, other.model) <= 5e-2
        for metric, values in other.history.items():
            assert one.history[metric] == pytest.approx(values, rel=5e-2), metric
        states = one.optimizer.state.values()
        assert {state["momentum_buffer"].dtype for state in states} == {torch.float32}


def test_training_and_validation_compute_in_bf16_wherever_they_run():
    for strategy in ("fused", "in_turn"):
        for result in train([job("bf16", seed) for seed in range(2)], strategy):
            assert set(result.history["num_bytes"]) == set(result.history["val_num_bytes"]) == {2.0}


def test_a_surrounding_autocast_is_inherited_or_turned_off():
    with torch.autocast("cpu", torch.bfloat16):
        inherited, turned_off = train([job("inherit"), job("float32")], "in_turn")
        fused = train([job("inherit", seed) for seed in range(2)], "fused")
    assert gap(inherited.model, by_hand(0, True)) <= 1e-5
    assert gap(turned_off.model, by_hand(0, False)) <= 1e-5
    assert gap(fused[0].model, by_hand(0, True)) <= 5e-2


def test_jobs_of_different_precision_are_different_structures():
    plan = carpool.plan([job("bf16", 0), job("bf16", 1), job("float32", 0)], device="cpu")
    assert [len(group.names) for group in plan.groups] == [2, 1]
    assert "'precision=' is float32, expected bf16" in plan.groups[1].reason


def test_an_unknown_precision_is_refused():
    with pytest.raises(OptionError, match=r"inherit, float32, bf16.*Received: 'fp8'"):
        job("fp8")


def test_the_check_is_loose_where_autocast_computes_and_strict_in_float64():
    cpu = torch.device("cpu")
    assert tolerance(torch.float32, cpu, False, lowered=True) == tolerance(torch.bfloat16, cpu, False)
    assert tolerance(torch.float64, cpu, False, lowered=True) == tolerance(torch.float64, cpu, False)


def deep() -> nn.Module:
    """Enough layers to amplify what bfloat16 rounds off."""
    blocks = [
        nn.Sequential(nn.Conv2d(2 if not i else 6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        for i in range(6)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


OPTIMIZERS = [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.01)]


def deep_jobs(optimizer: partial[torch.optim.Optimizer] = OPTIMIZERS[0]) -> list[carpool.Job]:
    torch.manual_seed(1)
    data = (torch.randn(32, 2, 8, 8), torch.randint(0, 3, (32,)))
    given = {"optimizer": optimizer, "epochs": 1, "validation_data": None}
    return [replace(job("bf16", seed, deep, **given), data=data) for seed in range(3)]


@pytest.fixture
def less_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that a network of a few layers is beyond it, as a ResNet is beyond what is allowed."""
    monkeypatch.setattr(compare, "tolerance", lambda *_: replace(LOW, weight=1e-3))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """For whom full precision was asked."""
    seen: list[object] = []
    real = verify.strict_step
    monkeypatch.setattr(verify, "strict_step", lambda *given: seen.append(given) or real(*given))
    return seen


@pytest.mark.usefixtures("less_is_allowed")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_may_differ_by_as_much_as_its_precision_makes_of_a_member_alone(
    asked: list[object], optimizer: partial[torch.optim.Optimizer]
):
    results = train(deep_jobs(optimizer), "fused")
    assert {result.strategy for result in results} == {"fused"}
    assert asked


@pytest.mark.usefixtures("less_is_allowed")
@pytest.mark.parametrize("times", [-1.0, 10.0], ids=["backward", "too far"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_wrong_step_is_refused_all_the_same(
    monkeypatch: pytest.MonkeyPatch, optimizer: partial[torch.optim.Optimizer], times: float
):
    real = verify.Verifier._together

    def falsified(self: verify.Verifier, size: int, rows: list[int]) -> dict[str, torch.Tensor]:
        before = self._tensors["weights"][rows].clone()
        found = real(self, size, rows)
        return found | {"weights": before + times * (found["weights"] - before)}

    monkeypatch.setattr(verify.Verifier, "_together", falsified)
    with pytest.raises(FusionError, match="differs from its step alone"):
        train(deep_jobs(optimizer), "fused")


@pytest.mark.usefixtures("less_is_allowed")
def test_what_only_runs_in_low_precision_is_compared_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 must have the same dtype")

    monkeypatch.setattr(verify, "strict_step", fails)
    with pytest.raises(FusionError, match=r"differs from its step alone.*\(allowed: 1e-03\)"):
        train(deep_jobs(), "fused")


def test_an_optimizer_that_keeps_other_things_is_refused_in_any_precision(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(differences, "_kept", lambda *_: {})
    for word in ("bf16", "float32"):
        with pytest.raises(FusionError, match=r"the optimizer's state of .* by inf"):
            train([job(word, seed, mlp) for seed in range(3)], "fused")


def test_in_full_precision_nobody_asks_for_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "strict_step", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(compare, "SINGLE", replace(SINGLE, weight=1e-12))
    with pytest.raises(FusionError, match="differs from its step alone"):
        train([job("float32", seed, mlp) for seed in range(3)], "fused")


def test_strictly_nothing_is_lowered():
    with torch.autocast("cpu", torch.bfloat16):
        with precision.strictly():
            assert set(precision.settings()) == {"ieee"}
            with precision.computing_in("bf16", "cpu"):
                assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    with precision.computing_in("bf16", "cpu"):
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("outer", ["none", "tf32", "ieee"])
def test_strictly_settings_come_back_and_still_follow_what_they_inherit(outer: str):
    place: Any = torch.backends
    try:
        place.fp32_precision = outer
        before = precision.settings()
        place.fp32_precision = "ieee"
        follows = precision.settings()
        place.fp32_precision = outer
        with precision.strictly():
            pass
        assert (place.fp32_precision, precision.settings()) == (outer, before)
        place.fp32_precision = "ieee"
        assert precision.settings() == follows
    finally:
        place.fp32_precision = "none"
