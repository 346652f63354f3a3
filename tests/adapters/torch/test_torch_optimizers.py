"""Optimizers in a fused group: the state they leave, members that go on, those without an update, those registered."""

import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from zoo import OPTIMIZERS, mlp, plain_loop, plain_objects, shown, tables

import carpool
from carpool.adapters.torch.train import TorchAdapter
from carpool.errors import FusionError
from carpool.job import Schedule
from carpool.kernels.updates import UNFUSED, UPDATES, Update, register
from carpool.planning.cursor import Chunk, Cursor
from carpool.result import Outcome, Results
from carpool.testing.conformance import assert_close

LION = Path(__file__).parents[3] / "examples" / "lion.py"
EPOCHS = 25  # 100 steps


def make() -> nn.Module:
    return mlp().double()


def jobs(optimizer: Callable[..., Any], lr: float = 2e-3, **options: Any) -> list[carpool.Job]:
    settings = {"batch_size": 16, "epochs": EPOCHS, **options}
    return [
        carpool.Job(
            settings.get("model", make),
            tables(True)["vector"],
            name=f"m{seed}",
            loss=F.cross_entropy,
            optimizer=partial(optimizer, lr=lr * (1 + seed)),
            seed=seed,
            **{key: value for key, value in settings.items() if key != "model"},
        )
        for seed in range(3)
    ]


def run(group: list[carpool.Job], strategy: str = "fused") -> Results:
    return carpool.train(group, device="cpu", compile=False, reporters=[], strategy=strategy)


def assert_like_the_plain_loop(group: list[carpool.Job], results: Results) -> None:
    for job, result in zip(group, results, strict=True):
        assert result.outcome is Outcome.COMPLETED
        left = shown(result.model, result.optimizer, result.history["loss"])
        assert_close(left, plain_loop(job, *plain_objects(job)), double=True)


def reason(group: list[carpool.Job]) -> str:
    plan = carpool.plan(group, device="cpu")
    assert "fused" not in {part.strategy for part in plan.groups}
    return plan.groups[0].reason


# What torch's own optimizers hold afterwards


def described(result: carpool.Result) -> dict[str, dict[str, Any]]:
    names = {p: name for name, p in result.model.named_parameters()}
    return {
        names[p]: {slot: (tuple(t.shape), t.dtype, t.device, t.requires_grad) for slot, t in state.items()}
        for p, state in result.optimizer.state.items()
    }


DEFAULTS = [
    pytest.param(
        name,
        default,
        marks=[pytest.mark.slow] * (default == torch.float64 and place % 3 > 0),
        id=f"{name}-{default}",
    )
    for place, name in enumerate(OPTIMIZERS)
    for default in (torch.float32, torch.float64)
]


@pytest.mark.parametrize(("name", "default"), DEFAULTS)
def test_the_slots_are_those_of_a_run_alone(name: str, default: torch.dtype):
    kind, lr = OPTIMIZERS[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        together, alone = (run(jobs(kind, lr, epochs=1), word) for word in ("fused", "in_turn"))
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(together, alone, strict=True):
        assert described(one) == described(other)


CYCLED = {
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9),
}


@pytest.mark.parametrize("name", CYCLED)
def test_a_cycle_moves_the_momentum_of_each_member(name: str):
    """OneCycleLR moves beta1 at every step, and NAdam's state remembers every beta1 there was."""
    cycle = partial(schedules.OneCycleLR, max_lr=0.01, total_steps=101, base_momentum=0.5, max_momentum=0.95)
    group = jobs(CYCLED[name], scheduler=Schedule(cycle, every="step"))
    assert_like_the_plain_loop(group, run(group))


def test_a_run_goes_on_from_optimizers_that_were_trained_elsewhere():
    group = jobs(torch.optim.NAdam, epochs=5)
    live, expected = [], []
    for job in group:
        objects, twins = plain_objects(job), plain_objects(job)
        plain_loop(job, *objects)
        live.append(replace(job, model=objects[0], optimizer=objects[1]))
        plain_loop(job, *twins)
        expected.append(plain_loop(job, *twins))
    for result, reference in zip(run(live), expected, strict=True):
        assert_close(shown(result.model, result.optimizer, result.history["loss"]), reference, double=True)


def test_members_of_unequal_count_and_tally_stand_together():
    """One has had twenty updates, the others none: RAdam rectifies it from the start, the others later."""
    for kind in (torch.optim.RAdam, torch.optim.NAdam):
        group = jobs(kind, epochs=5)
        objects = plain_objects(group[1])
        plain_loop(group[1], *objects)
        twins = plain_objects(group[1])
        plain_loop(group[1], *twins)
        ahead = replace(group[1], model=objects[0], optimizer=objects[1])
        results = run([group[0], ahead, group[2]])
        references = [
            plain_loop(group[0], *plain_objects(group[0])),
            plain_loop(group[1], *twins),
            plain_loop(group[2], *plain_objects(group[2])),
        ]
        for result, expected in zip(results, references, strict=True):
            assert_close(shown(result.model, result.optimizer, result.history["loss"]), expected, double=True)


def test_a_group_whose_tallies_disagree_is_not_fused():
    def tampered(job: carpool.Job) -> carpool.Job:
        model, optimizer, _ = plain_objects(job)
        plain_loop(job, model, optimizer, None)
        next(iter(optimizer.state.values()))["mu_product"].mul_(0.5)
        return replace(job, model=model, optimizer=optimizer)

    group = [tampered(job) for job in jobs(torch.optim.NAdam, epochs=1)]
    assert "parameters of one group differ in 'mu_product'" in reason(group)


def test_each_member_has_its_own_initial_accumulator():
    group = [
        replace(job, optimizer=partial(torch.optim.Adagrad, lr=0.02, initial_accumulator_value=start))
        for job, start in zip(jobs(torch.optim.Adagrad), (0.0, 0.1, 1.0), strict=True)
    ]
    assert_like_the_plain_loop(group, run(group))


def test_a_state_before_the_first_step_keeps_an_initial_accumulator():
    """Adagrad has state from the start: a row that has not stepped yet hands it over."""
    adapter = TorchAdapter(compile=False)
    group = jobs(partial(torch.optim.Adagrad, initial_accumulator_value=0.5), 0.02)
    for job in group:
        adapter.describe(job)
    assert adapter.fuser is not None
    session = adapter.fuser.open(group, len(group), "cpu", lambda *_: None)
    state = session.state([0])[0]
    assert {float(slots["sum"].min()) for slots in state.optimizer.values()} == {0.5}
    session.advance(Chunk((0, 1, 2), (Cursor(),) * 3, 16, 2))
    session.load(0, state)
    assert all(
        torch.equal(s["sum"], state.optimizer[n]["sum"]) for n, s in session.state([0])[0].optimizer.items()
    )


# Those without an update


@pytest.mark.parametrize("kind", UNFUSED, ids=lambda kind: kind.__name__)
def test_an_optimizer_without_an_update_says_why(kind: Any):
    group = jobs(kind, model=lambda: nn.Linear(6, 3, bias=False).double())
    assert f"{kind.__name__} has no stacked update ({UNFUSED[kind]})" in reason(group)


def test_a_derived_class_is_another_optimizer():
    class Own(torch.optim.Adam):
        pass

    assert "Own has no stacked update (carpool.kernels.updates.register gives it one)" in reason(jobs(Own))


# Registered


@pytest.fixture
def table() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(UPDATES)
    yield
    UPDATES.clear()
    UPDATES.update(before)


@pytest.fixture(scope="module")
def example() -> Any:
    return runpy.run_path(str(LION))


def test_the_lion_of_the_example_fuses_and_equals_the_plain_loop(example: Any):
    group = jobs(partial(example["Lion"], weight_decay=0.1, betas=(0.8, 0.95)), 1e-3)
    assert_like_the_plain_loop(group, run(group))


def test_the_documents_show_the_example():
    assert LION.read_text() in (LION.parents[1] / "docs" / "fusing.md").read_text()


def momentum() -> type[torch.optim.Optimizer]:
    """A class of its own each time, as a notebook cell makes one: momentum with a count that is an int."""

    class Momentum(torch.optim.Optimizer):
        def __init__(self, params, lr, friction=0.1) -> None:
            super().__init__(params, {"lr": lr, "friction": friction})

        @torch.no_grad()
        def step(self, closure=None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state.update(step=0, speed=torch.zeros_like(p))
                    state["step"] += 1
                    state["speed"].mul_(1 - group["friction"]).add_(p.grad, alpha=group["friction"])
                    p.sub_(group["lr"] / state["step"] ** 0.1 * state["speed"])

    return Momentum


class MomentumUpdate(Update):
    hypers = ("lr", "friction")
    counts = True

    def slots(self, group) -> tuple[str, ...]:
        return ("speed",)

    def counter(self, count: float) -> Any:
        return int(count)

    def scalars(self, numbers, count) -> list[Tensor]:
        return [numbers["lr"] / count**0.1, numbers["friction"]]

    def apply(self, weight, grad, slots, columns, options) -> list[Tensor]:
        lr, friction = columns
        speed = slots[0] * (1 - friction) + friction * grad
        return [weight - lr * speed, speed]


class WrongWeight(MomentumUpdate):
    def apply(self, weight, grad, slots, columns, options) -> list[Tensor]:
        _, speed = super().apply(weight, grad, slots, columns, options)
        return [weight - 1.01 * columns[0] * speed, speed]


class WrongSlot(MomentumUpdate):
    """The first step's weights are right; all later ones would be wrong."""

    def apply(self, weight, grad, slots, columns, options) -> list[Tensor]:
        moved, speed = super().apply(weight, grad, slots, columns, options)
        return [moved, 1.01 * speed]


class WrongName(MomentumUpdate):
    def slots(self, group) -> tuple[str, ...]:
        return ("velocity",)


class Uncounted(MomentumUpdate):
    counts = False


class Counted(MomentumUpdate):
    def counter(self, count: float) -> Tensor:
        return torch.tensor(count)


class OthersRate(MomentumUpdate):
    """Reads a member's own number where only shared options are."""

    def apply(self, weight, grad, slots, columns, options) -> list[Tensor]:
        return [weight - options["lr"] * grad, slots[0]]


def test_an_optimizer_whose_constructor_asks_for_more_and_whose_count_is_an_int(table: None):
    kind = momentum()
    register(kind, MomentumUpdate())
    group = jobs(kind, 0.05, epochs=3)
    results = run(group)
    assert_like_the_plain_loop(group, results)
    assert {type(state["step"]) for state in results[0].optimizer.state.values()} == {int}
    again = [
        replace(job, model=r.model, optimizer=r.optimizer) for job, r in zip(group, results, strict=True)
    ]
    assert {state["step"] for state in run(again)[0].optimizer.state.values()} == {24}


WRONG = {
    WrongWeight: "differs from its step alone",
    WrongSlot: "'speed' of",
    WrongName: "velocity",
    Uncounted: "'step': 'int'",
    Counted: "'step': 'Tensor'",
    OthersRate: "KeyError: 'lr'",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_update_never_trains(wrong: type[Update], table: None):
    kind = momentum()
    register(kind, wrong())
    with pytest.raises(FusionError, match=re.escape(WRONG[wrong])):
        run(jobs(kind, 0.05, epochs=3))
    group = jobs(kind, 0.05, epochs=3)
    results = run(group, "auto")
    assert "fused" not in {result.strategy for result in results}
    assert WRONG[wrong] in results[0].reason
    assert_like_the_plain_loop(group, results)


def test_two_classes_of_one_name_are_two_structures(table: None):
    one, other = momentum(), momentum()
    register(one, MomentumUpdate())
    register(other, MomentumUpdate())
    group = [*jobs(one, 0.05)[:2], *[replace(job, name=f"other {job.name}") for job in jobs(other, 0.05)[:2]]]
    plan = carpool.plan(group, device="cpu")
    assert [part.strategy for part in plan.groups] == ["fused", "fused"]
