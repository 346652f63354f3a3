"""A stack in the user's own loop ends where plain loops end, member by member."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR
from torch.utils.flop_counter import FlopCounterMode

import carpool
from carpool.adapters.torch import keep
from carpool.errors import (
    DataError,
    DeviceError,
    FusionError,
    LossError,
    ModelError,
    OptimizerError,
    OptionError,
)
from carpool.kernels.random import Keyed

MEMBERS, STEPS, BATCH = 3, 100, 8
source = torch.Generator().manual_seed(0)
xs = torch.randn(STEPS, BATCH, 6, dtype=torch.float64, generator=source)
ys = torch.randint(0, 3, (STEPS, BATCH), generator=source)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)).double()


def half_frozen() -> nn.Module:
    made = plain()
    made.get_submodule("0").requires_grad_(False)
    return made


class Unused(nn.Module):
    """A layer that no loss reaches: a real optimizer skips it, weight decay included."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def tied() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    made[2].weight = made[0].weight
    return made


Optimizer = Callable[[nn.Module, int], torch.optim.Optimizer]


def sgd(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.01 * (i + 1), momentum=0.5 + 0.1 * i, weight_decay=0.01 * i
    )


def plain_sgd(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05 * (i + 1))


def adam(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3 * (i + 1), weight_decay=0.01)


def adamw(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3 * (i + 1), betas=(0.9 - 0.1 * i, 0.99))


def nadam(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=1e-3 * (i + 1))


def adagrad(model: nn.Module, i: int) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01 * (i + 1), initial_accumulator_value=0.1)


def grouped(model: nn.Module, i: int) -> torch.optim.Optimizer:
    first, *rest = model.children()
    own = {id(p) for p in first.parameters()}
    others = [p for part in rest for p in part.parameters() if id(p) not in own]
    return torch.optim.AdamW(
        [{"params": list(first.parameters()), "lr": 1e-4}, {"params": others, "weight_decay": 0.1 * i}],
        lr=1e-2,
    )


def made(
    model: Callable[[], nn.Module], optimizer: Optimizer, count: int = MEMBERS
) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(3)
    models = [model().double() for _ in range(count)]
    return models, [optimizer(one, i) for i, one in enumerate(models)]


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    *,
    scheduler: Any = None,
    clip_norm: float | None = None,
    seed: int = 0,
) -> list[float]:
    """The loop that everybody writes; `Keyed` only gives dropout the member's masks."""
    losses = []
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        with Keyed(seed, step):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip_norm is not None:
            clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(xs, ys, strict=True))


def assert_same(one: nn.Module, other: nn.Module, atol: float = 1e-8) -> None:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, leaf in states[0].items():
        torch.testing.assert_close(
            leaf, states[1][name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_same_optimizer(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    full = {
        key: state for key, state in theirs["state"].items() if any(v is not None for v in state.values())
    }
    assert ours["state"].keys() == full.keys()
    for key, state in full.items():
        for slot, value in state.items():
            torch.testing.assert_close(ours["state"][key][slot], value, rtol=0, atol=1e-8)


# Conformance


def test_a_stack_under_autocast_agrees_with_plain_loops_as_far_as_16_bits_go():
    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5, bias=False), nn.Tanh(), nn.Linear(5, 3))

    torch.manual_seed(3)
    models = [narrow() for _ in range(MEMBERS)]
    twins = copy.deepcopy(models)
    few = [(x.float(), y) for x, y in batches()[:5]]
    with carpool.Stack(models, [sgd(model, i) for i, model in enumerate(models)]) as stack:
        for x, y in few:
            with torch.autocast("cpu", torch.bfloat16):
                stack.step(F.cross_entropy, x, y)
    for i, (model, twin) in enumerate(zip(models, twins, strict=True)):
        optimizer = sgd(twin, i)
        for x, y in few:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(twin(x), y)
            loss.backward()
            optimizer.step()
        assert_same(model, twin, atol=2e-3)


RULES: list[Optimizer] = [plain_sgd, sgd, adam, adamw, nadam, adagrad, grouped]
KINDS: list[Callable[[], nn.Module]] = [plain, normed, half_frozen, dropping, Unused, tied]


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        pytest.param(
            kind,
            rule,
            marks=() if (place + number) % 3 == 0 else pytest.mark.slow,
            id=f"{kind.__name__}-{rule.__name__}",
        )
        for place, kind in enumerate(KINDS)
        for number, rule in enumerate(RULES)
    ],
)
def test_a_stack_equals_plain_loops(model: Callable[[], nn.Module], optimizer: Optimizer):
    models, optimizers = made(model, optimizer)
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    with carpool.Stack(models, optimizers) as stack:
        losses = torch.stack([stack.step(F.cross_entropy, x, y) for x, y in batches()])
    assert losses.shape == (STEPS, MEMBERS)
    for i, (twin, own) in enumerate(zip(twins, their_optimizers, strict=True)):
        expected = by_hand(twin, own, batches(), seed=i)
        torch.testing.assert_close(
            losses[:, i], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8
        )
        assert_same(models[i], twin)
        assert_same_optimizer(optimizers[i], own)


@pytest.mark.parametrize(
    "schedule",
    [
        partial(ExponentialLR, gamma=0.97),
        partial(CosineAnnealingLR, T_max=30),
        partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    ],
)
def test_the_user_s_own_schedulers_work_as_usual(schedule: Any):
    models, optimizers = made(normed, sgd)
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    with carpool.Stack(models, optimizers) as stack:
        for x, y in batches():
            stack.step(F.cross_entropy, x, y)
            for scheduler in schedulers[1:]:  # the first has a constant rate
                scheduler.step()
    for i, (twin, own) in enumerate(zip(twins, their_optimizers, strict=True)):
        by_hand(twin, own, batches(), scheduler=schedule(own) if i else None)
        assert_same(models[i], twin)


def test_each_member_on_a_batch_of_its_own_with_clipping():
    models, optimizers = made(normed, adam)
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    own = [[(x + i, (y + i) % 3) for x, y in batches()] for i in range(MEMBERS)]
    with carpool.Stack(models, optimizers) as stack:
        for together in zip(*own, strict=True):
            x, y = (torch.stack(parts) for parts in zip(*together, strict=True))
            stack.step(F.cross_entropy, x, y, each=True, clip_norm=0.1)
    for i, twin in enumerate(twins):
        by_hand(twin, their_optimizers[i], own[i], clip_norm=0.1)
        assert_same(models[i], twin)


def test_batches_of_other_shapes_and_objectives_take_turns():
    def penalised(model: nn.Module, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y) + weight * sum(p.square().sum() for p in model.parameters())

    models, optimizers = made(plain, adamw)
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    stack = carpool.Stack(models, optimizers)
    for k, (x, y) in enumerate(batches()[:30]):
        weight = torch.tensor(0.01 * k, dtype=torch.float64)
        size = BATCH if k % 3 else 5
        losses = (
            stack.step(x[:size], y[:size], weight, step=penalised)
            if k % 2
            else stack.step(F.cross_entropy, x[:size], y[:size])
        )
        for i, (twin, own) in enumerate(zip(twins, their_optimizers, strict=True)):
            own.zero_grad()
            alone = (
                penalised(twin, x[:size], y[:size], weight)
                if k % 2
                else F.cross_entropy(twin(x[:size]), y[:size])
            )
            alone.backward()
            own.step()
            torch.testing.assert_close(losses[i], alone.detach(), rtol=0, atol=1e-8)
    for ours, twin in zip(stack, twins, strict=True):
        assert_same(ours, twin)


def test_a_stack_draws_the_masks_of_jobs_with_its_seeds():
    seeds = [5, 2**40, -3]
    x, y = xs[0], ys[0]
    models, optimizers = made(dropping, plain_sgd)
    twins = copy.deepcopy(models)
    stack = carpool.Stack(models, optimizers, seeds=seeds)
    for _ in range(4):
        stack.step(F.cross_entropy, x, y)
    stack.sync()
    jobs = [
        carpool.Job(
            twin,
            (x, y),
            loss=F.cross_entropy,
            optimizer=plain_sgd(twin, i),
            batch_size=BATCH,
            epochs=4,
            shuffle=False,
            seed=seed,
        )
        for i, (twin, seed) in enumerate(zip(twins, seeds, strict=True))
    ]
    carpool.train(jobs, device="cpu", strategy="in_turn", reporters=[])
    for ours, twin in zip(models, twins, strict=True):
        assert_same(ours, twin)


def test_optimizers_that_have_stepped_go_on():
    models, optimizers = made(normed, adam)
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    half = STEPS // 2
    for i, (one, own) in enumerate(zip(models, optimizers, strict=True)):
        by_hand(one, own, batches()[: half - 10 * i])
    with carpool.Stack(models, optimizers) as stack:
        for x, y in batches()[half:]:
            stack.step(F.cross_entropy, x, y)
    for i, (twin, own) in enumerate(zip(twins, their_optimizers, strict=True)):
        by_hand(twin, own, [*batches()[: half - 10 * i], *batches()[half:]])
        assert_same(models[i], twin)
        assert_same_optimizer(optimizers[i], own)


def test_float32_stays_within_its_tolerance():
    torch.manual_seed(0)
    models = [normed().float() for _ in range(MEMBERS)]
    optimizers = [plain_sgd(model, i) for i, model in enumerate(models)]
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    feed = [(x.float(), y) for x, y in batches()]
    stack = carpool.Stack(models, optimizers)
    losses = torch.stack([stack.step(F.cross_entropy, x, y) for x, y in feed])
    assert losses.dtype == torch.float32
    for i, (twin, own) in enumerate(zip(twins, their_optimizers, strict=True)):
        torch.testing.assert_close(losses[:, i], torch.tensor(by_hand(twin, own, feed)), rtol=1e-4, atol=1e-6)
        assert_same(stack[i], twin, atol=1e-4)


def test_a_compiled_stack_equals_plain_loops():
    models, optimizers = made(normed, adamw)
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    with carpool.Stack(models, optimizers, compile=True) as stack:
        for x, y in batches():
            stack.step(F.cross_entropy, x, y)
    for i, twin in enumerate(twins):
        by_hand(twin, their_optimizers[i], batches())
        assert_same(models[i], twin)


# Faults stay where they are


def test_a_member_that_was_dropped_changes_no_bit_of_the_others():
    whole, whole_optimizers = made(normed, adamw)
    rest, rest_optimizers = copy.deepcopy((whole, whole_optimizers))
    kept: dict[str, Any] = {}
    one, other = carpool.Stack(whole, whole_optimizers), carpool.Stack(rest, rest_optimizers)
    for k, (x, y) in enumerate(batches()):
        if k == 10:
            other.drop(1)
            kept = copy.deepcopy(rest[1].state_dict())
        both = one.step(F.cross_entropy, x, y), other.step(F.cross_entropy, x, y)
        assert torch.equal(both[0][[0, 2]], both[1][[0, 2]])
        assert bool(both[1][1].isnan()) == (k >= 10)
    assert (other.active, len(other), repr(other)) == ((0, 2), 3, "Stack(3 models, 2 active)")
    for i in (0, 2):
        assert_same(one[i], other[i], atol=0)
    for name, leaf in other[1].state_dict().items():
        assert torch.equal(leaf, kept[name])
    assert rest_optimizers[1].state_dict()["state"][0]["step"] == 10


def test_a_dropped_member_s_own_batch_is_not_read():
    models, optimizers = made(lambda: nn.Sequential(nn.Embedding(4, 5), nn.Linear(5, 3)), sgd)
    stack = carpool.Stack(models, optimizers)
    x, y = torch.randint(0, 4, (MEMBERS, BATCH)), ys[:MEMBERS]
    stack.step(F.cross_entropy, x, y, each=True)
    stack.drop(-1)
    x[2] = 99
    losses = stack.step(F.cross_entropy, x, y, each=True)
    assert losses.isfinite().tolist() == [True, True, False]


def test_a_nan_leaves_its_row_untouched_and_the_next_step_counts_again():
    models, optimizers = made(normed, adam)
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    stack = carpool.Stack(models, optimizers)
    feed = [(x.expand(MEMBERS, *x.shape).clone(), y.expand(MEMBERS, -1)) for x, y in batches()[:6]]
    feed[2][0][1] = torch.nan
    for k, (x, y) in enumerate(feed):
        before = copy.deepcopy(stack[1].state_dict())
        losses = stack.step(F.cross_entropy, x, y, each=True)
        assert losses.isnan().tolist() == [False, k == 2, False]
        same = all(torch.equal(leaf, before[name]) for name, leaf in stack[1].state_dict().items())
        assert same == (k == 2)
    for i, twin in enumerate(twins):
        by_hand(twin, their_optimizers[i], [b for k, b in enumerate(batches()[:6]) if k != 2 or i != 1])
        assert_same(stack[i], twin)
        assert_same_optimizer(optimizers[i], their_optimizers[i])


# Members


def test_the_user_s_objects_are_written_when_asked_for():
    models, optimizers = made(plain, adam)
    start = copy.deepcopy(models[0].state_dict())
    stack = carpool.Stack(models, optimizers)
    stack.step(F.cross_entropy, xs[0], ys[0])
    assert torch.equal(models[0].state_dict()["0.weight"], start["0.weight"])
    assert not optimizers[0].state
    assert stack[0] is models[0]
    assert not torch.equal(models[0].state_dict()["0.weight"], start["0.weight"])
    assert next(iter(optimizers[0].state.values()))["step"] == 1
    assert not optimizers[1].state
    assert list(stack) == models
    assert optimizers[1].state
    with pytest.raises(IndexError, match="a position below 3"):
        stack[3]


def test_leaving_a_block_by_an_error_writes_back_too():
    models, optimizers = made(plain, sgd)
    start = copy.deepcopy(models[2].state_dict())
    stack = carpool.Stack(models, optimizers)

    def loop() -> None:
        with stack:
            stack.step(F.cross_entropy, xs[0], ys[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert not torch.equal(models[2].state_dict()["0.weight"], start["0.weight"])


def test_evaluation_and_predictions_are_those_of_the_models():
    models, optimizers = made(normed, adam)
    stack = carpool.Stack(models, optimizers)
    x, y = xs[1], ys[1]

    def assert_alike() -> None:
        twins = [copy.deepcopy(model).eval() for model in stack]
        with torch.no_grad():
            predictions = torch.stack([twin(x) for twin in twins])
            losses = torch.stack([F.cross_entropy(twin(x), y) for twin in twins])
        torch.testing.assert_close(stack(x), predictions)
        torch.testing.assert_close(stack.evaluate(F.cross_entropy, x, y), losses)
        torch.testing.assert_close(stack(torch.stack([x] * MEMBERS), each=True), predictions)
        own = (torch.stack([x] * MEMBERS), y.expand(MEMBERS, -1))
        torch.testing.assert_close(stack.evaluate(F.cross_entropy, *own, each=True), losses)
        by_step = stack.evaluate(x, y, step=lambda model, x, y: F.cross_entropy(model(x), y))
        torch.testing.assert_close(by_step, losses)

    assert_alike()
    for k in range(3):
        stack.step(F.cross_entropy, xs[k], ys[k])
    stack.drop(0)
    assert_alike()
    assert all(model.training for model in models)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return {"sum": self.layer(a) + self.layer(b), "sign": bool((a > 1e9).any()) or 0.0 * self.layer(a)}


def test_predictions_that_cannot_be_vmapped_are_made_one_by_one():
    models, optimizers = made(Two, sgd)
    stack = carpool.Stack(models, optimizers)
    outputs = stack({"a": xs[0], "b": xs[1]})
    with torch.no_grad():
        expected = torch.stack([model(xs[0], xs[1])["sum"] for model in models])
    torch.testing.assert_close(outputs["sum"], expected)
    torch.testing.assert_close(stack((xs[0], xs[1]))["sum"], expected)


def test_changed_weights_are_noticed_and_can_be_loaded():
    models, optimizers = made(plain, adam)
    stack = carpool.Stack(models, optimizers)
    stack.step(F.cross_entropy, xs[0], ys[0])
    stack[1].load_state_dict(stack[0].state_dict())
    with pytest.raises(ModelError, match=r"model 1 to be changed by the stack only.*stack.load\(1\)"):
        stack.step(F.cross_entropy, xs[0], ys[0])
    stack.load(1)
    losses = stack.step(F.cross_entropy, xs[1], ys[1])
    assert losses[0] == losses[1]
    with torch.no_grad():
        models[2].get_submodule("0").weight.zero_()  # type: ignore[operator]  # behind the stack's back, after a step
    with pytest.raises(ModelError, match="model 2"):
        stack.sync()


def test_hyper_parameters_are_read_at_each_step():
    models, optimizers = made(plain, sgd)
    stack = carpool.Stack(models, optimizers)
    stack.step(F.cross_entropy, xs[0], ys[0])
    before = copy.deepcopy(stack[0].state_dict())
    optimizers[0].param_groups[0]["lr"] = 0.0
    stack.step(F.cross_entropy, xs[0], ys[0])
    for name, leaf in stack[0].state_dict().items():
        assert torch.equal(leaf, before[name])
    optimizers[0].param_groups[0]["momentum"] = 0.0
    with pytest.raises(OptimizerError, match="optimizer 0 to keep what changes its arithmetic"):
        stack.step(F.cross_entropy, xs[0], ys[0])


def test_a_captured_value_that_changes_is_seen():
    scale = 1.0

    def loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return scale * F.cross_entropy(prediction, target)

    stack = carpool.Stack(*made(plain, plain_sgd))
    one = stack.evaluate(loss, xs[0], ys[0])
    scale = 2.0
    torch.testing.assert_close(stack.evaluate(loss, xs[0], ys[0]), 2 * one)


def test_a_step_is_traced_once_a_shape(monkeypatch: pytest.MonkeyPatch):
    made_ready: list[int] = []
    program = keep.Program

    def note(*arguments: Any) -> Any:
        made_ready.append(1)
        return program(*arguments)

    monkeypatch.setattr(keep, "Program", note)
    stack = carpool.Stack(*made(plain, sgd))
    for k in range(6):
        size = 5 if k % 2 else BATCH
        stack.step(lambda p, t: F.cross_entropy(p, t), xs[k][:size], ys[k][:size])
    assert len(made_ready) == 2


# A trunk that all share


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


def trunk() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()).double().requires_grad_(False)


def test_a_shared_frozen_trunk_is_kept_once_and_trains_as_alone():
    shared = trunk().eval()
    models, optimizers = made(lambda: Headed(shared), adamw)
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    with carpool.Stack(models, optimizers) as stack:
        for x, y in batches():
            stack.step(F.cross_entropy, x, y)
        assert stack(xs[0]).shape == (MEMBERS, BATCH, 3)
        assert not any("trunk" in name and "shared" not in name for name in stack._kept._rows.tensors)
    for i, twin in enumerate(twins):
        by_hand(twin, their_optimizers[i], batches())
        assert_same(models[i], twin)


def test_a_shared_frozen_trunk_is_computed_once_a_step():
    shared = trunk().eval()
    stack = carpool.Stack(*made(lambda: Headed(shared), sgd))
    stack.step(F.cross_entropy, xs[0], ys[0])  # traces and checks
    with FlopCounterMode(display=False) as counter:
        stack.step(F.cross_entropy, xs[1], ys[1])
    head = 2 * BATCH * 5 * 3
    assert counter.get_total_flops() == 2 * BATCH * 6 * 5 + MEMBERS * 2 * head  # heads: forward and backward


def test_a_shared_trunk_that_learns_statistics_is_refused():
    shared = trunk().train()
    models, optimizers = made(lambda: Headed(shared), sgd)
    with pytest.raises(FusionError, match=r"writes into 'trunk.1.*', which all members share"):
        carpool.Stack(models, optimizers).step(F.cross_entropy, xs[0], ys[0])


# Misuse


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def test_other_structures_are_told_by_their_first_difference():
    models, optimizers = made(plain, sgd, 2)
    odd = wide()
    with pytest.raises(FusionError, match=r"model 2 differs from model 0: '0.out_features' is 7, expected 5"):
        carpool.Stack([*models, odd], [*optimizers, sgd(odd, 0)])
    other = plain()
    with pytest.raises(
        FusionError, match=r"model 2 differs from model 0: 'optimizer=' is torch.optim.adam.Adam"
    ):
        carpool.Stack([*models, other], [*optimizers, adam(other, 0)])


def test_models_and_optimizers_are_checked():
    models, optimizers = made(plain, sgd, 2)
    a, _ = models
    c, d = made(plain, sgd, 2)[0]
    stray = [torch.optim.ASGD(model.parameters()) for model in models]
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ([], [], ModelError, "at least one model"),
        (models, optimizers[:1], OptimizerError, "2 optimizers, one a model. Received: 1"),
        (models, optimizers[::-1], OptimizerError, "optimizer 0 to hold parameters of model 0 only"),
        (models, [optimizers[0], "sgd"], OptimizerError, "str at position 1"),
        ([3, a], optimizers, ModelError, "Received: int"),
        ([a, 3], optimizers, ModelError, "int at position 1"),
        ([a, a], [optimizers[0], sgd(a, 0)], ModelError, "one Sequential in models 0 and 1"),
        (models, stray, FusionError, "ASGD has no stacked update"),
        ([c, d.to("meta")], [sgd(c, 0), sgd(d, 0)], DeviceError, "cpu, meta"),
    ]
    for given, theirs, error, words in cases:
        with pytest.raises(error, match=words):
            carpool.Stack(given, theirs)
    with pytest.raises(OptionError, match=r"1 seeds, one a model. Received: 2"):
        carpool.Stack([a], [optimizers[0]], seeds=[1, 2])


def test_steps_are_checked():
    stack = carpool.Stack(*made(plain, sgd))
    x, y = xs[0], ys[0]
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((x, y), {}, LossError, "Received: Tensor, Tensor"),
        ((), {}, LossError, "Received: nothing"),
        ((partial(F.cross_entropy, reduction="none"), x, y), {}, LossError, r"shape \(8,\)"),
        ((lambda p, t: 1.0, x, y), {}, LossError, "Received: float"),
        ((x, y), {"step": 3}, LossError, "step= to be a function"),
        ((F.cross_entropy, x, y), {"each": True}, DataError, r"a first dimension of 3.*shape \(8, 6\)"),
        ((F.cross_entropy, x, y), {"clip_norm": 0.0}, OptionError, "clip_norm above 0"),
        ((x, 0.5), {"step": lambda m, x, w: w * m(x).mean()}, DataError, r"torch.tensor\(0.5\)"),
    ]
    for arguments, options, error, words in cases:
        with pytest.raises(error, match=words):
            stack.step(*arguments, **options)
    with pytest.raises(LossError, match=r"shape \(8,\)"):
        stack.evaluate(partial(F.cross_entropy, reduction="none"), x, y)
    with pytest.raises(IndexError, match=r"Target \d is out of bounds"):
        stack.step(F.cross_entropy, x, y + 3)
    for position in range(MEMBERS):
        stack.drop(position)
    with pytest.raises(OptionError, match="all were dropped"):
        stack.step(F.cross_entropy, x, y)


class Branching(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        return out * 2 if out.mean() > 0 else out


def test_a_step_that_cannot_be_stacked_names_the_user_s_line():
    stack = carpool.Stack(*made(lambda: Branching(6, 3), sgd))
    with pytest.raises(FusionError, match=r"return out \* 2 if out.mean"):
        stack.step(F.cross_entropy, xs[0], ys[0])


def test_objectives_that_reach_other_parameters_are_refused():
    models, optimizers = made(Unused, sgd)
    stack = carpool.Stack(models, optimizers)
    stack.step(F.cross_entropy, xs[0], ys[0])
    with pytest.raises(FusionError, match=r"other parameters than the steps before it \(unused.bias"):
        stack.step(xs[0], step=lambda model, x: (model.used(x) + model.unused(x)).mean())


def test_a_step_that_cannot_be_compared_leaves_no_trace_either(monkeypatch):
    models, optimizers = made(plain, sgd)
    start = copy.deepcopy(models[0].state_dict())
    stack = carpool.Stack(models, optimizers)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(keep, "compare", full)
    with pytest.raises(torch.OutOfMemoryError):
        stack.step(F.cross_entropy, xs[0], ys[0])
    for name, leaf in stack[0].state_dict().items():
        assert torch.equal(leaf, start[name])


def test_a_step_that_differs_from_the_members_alone_is_refused_and_leaves_no_trace(monkeypatch):
    models, optimizers = made(plain, sgd)
    start = copy.deepcopy(models[0].state_dict())
    stack = carpool.Stack(models, optimizers)
    odd = models[1].get_submodule("1")
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x.tanh() * getattr(self, "odd", 1.0))
    odd.odd = 2.0  # type: ignore[assignment]
    with pytest.raises(FusionError, match="the fused step of 'model 1' differs from its step alone"):
        stack.step(F.cross_entropy, xs[0], ys[0])
    del odd.odd
    for name, leaf in stack[0].state_dict().items():
        assert torch.equal(leaf, start[name])
