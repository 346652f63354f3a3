"""Stacked updates beside torch's own optimizers, without a model: gradients by hand, hyper-parameters that move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import carpool.kernels.updates
from carpool.errors import OptionError
from carpool.kernels.updates import UNFUSED, UPDATES, Update, register

STEPS, SIZE = 100, 7
MEMBERS = ({"lr": 0.01}, {"lr": 0.003, "weight_decay": 0.05}, {"lr": 0.02, "eps": 1e-5})
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"maximize": True}),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.NAdam, {"momentum_decay": 0.05, "decoupled_weight_decay": True, "maximize": True}),
    (torch.optim.RAdam, {}),
    (torch.optim.RAdam, {"betas": (0.9, 0.9), "decoupled_weight_decay": True, "maximize": True}),
    (torch.optim.RAdam, {"betas": (0.9, 0.5)}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adamax, {"maximize": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.RMSprop, {"momentum": 0.7}),
    (torch.optim.RMSprop, {"momentum": 0.7, "centered": True, "alpha": 0.9, "maximize": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.05}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.3, "maximize": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adadelta, {"rho": 0.7, "maximize": True}),
]


def name(case: tuple[type, dict[str, Any]]) -> str:
    return "-".join([case[0].__name__, *map(str, case[1])])


def moved(group: dict[str, Any], step: int) -> None:
    """What a cycling scheduler does: another rate and another beta1 at every step."""
    group["lr"] *= 1.01
    if "betas" in group:
        group["betas"] = (0.85 + 0.1 * (step % 10) / 10, group["betas"][1])


class Stack:
    """The members' state in matrices, advanced by an update as a fused group advances it."""

    def __init__(self, update: Update, members: list[torch.optim.Optimizer], weights: list[Tensor]) -> None:
        self.update, group = update, members[0].param_groups[0]
        self.options, self.slots = dict(update.structure(group)), update.slots(group)
        self.weight = torch.stack([weight.detach().clone() for weight in weights])
        blank = torch.zeros_like(self.weight)
        held = [
            torch.stack(
                [o.state[w].get(slot, row) for o, w, row in zip(members, weights, blank, strict=True)]
            )
            for slot in self.slots
        ]
        tallies = [torch.full((len(members), 1), start) for _, start in update.tallies]
        self.state = [*held, *tallies]

    def step(self, grad: Tensor, groups: list[Mapping[str, Any]], count: int) -> None:
        rows = torch.tensor([self.update.numbers(group) for group in groups], dtype=torch.float64)
        numbers = dict(zip(self.update.hypers, rows.unbind(1), strict=True))
        scalars = self.update.scalars(numbers, torch.tensor(float(count), dtype=torch.float64))
        columns = [column.expand(len(groups))[:, None] for column in scalars]
        self.weight, *self.state = self.update.apply(self.weight, grad, self.state, columns, self.options)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_stack_ends_where_torchs_own_optimizer_ends(case: tuple[type[torch.optim.Optimizer], dict]):
    kind, options = case
    weights = [torch.randn(SIZE, dtype=torch.float64, requires_grad=True) for _ in MEMBERS]
    known = kind([torch.zeros(1)]).defaults  # type: ignore[call-arg, arg-type]
    members = [
        kind([weight], foreach=False, **options, **{k: v for k, v in own.items() if k in known})  # type: ignore[call-arg, arg-type]
        for weight, own in zip(weights, MEMBERS, strict=True)
    ]
    update = UPDATES[kind]
    stack = Stack(update, members, weights)
    for step in range(STEPS):
        grad = torch.randn(len(MEMBERS), SIZE, dtype=torch.float64)
        for row, (member, weight) in enumerate(zip(members, weights, strict=True)):
            moved(member.param_groups[0], step)
            weight.grad = grad[row].clone()
            member.step()
        stack.step(grad, [member.param_groups[0] for member in members], step + 1)
    for row, (member, weight) in enumerate(zip(members, weights, strict=True)):
        torch.testing.assert_close(stack.weight[row], weight.detach(), rtol=0, atol=1e-8)
        state = {slot: value for slot, value in member.state[weight].items() if value is not None}
        assert state.pop("step", None) == (STEPS if update.counts else None)
        assert set(state) == {*stack.slots, *dict(update.tallies)}
        for slot, value in zip([*stack.slots, *dict(update.tallies)], stack.state, strict=True):
            torch.testing.assert_close(value[row].view_as(state[slot]), state[slot], rtol=1e-7, atol=1e-10)


def test_every_update_is_tried_here():
    ours = {kind for kind in UPDATES if kind.__module__.startswith("torch.")}
    assert {kind for kind, _ in CASES} == ours


def test_each_of_torchs_own_optimizers_is_fused_or_has_a_reason():
    everything = {
        thing
        for thing in vars(torch.optim).values()
        if isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer)
    }
    assert everything - {torch.optim.Optimizer} == {*UNFUSED, *(k for k in UPDATES if k in everything)}
    assert not UNFUSED.keys() & UPDATES.keys()


# Registering


def test_what_an_update_may_say_is_this():
    said = [name for name in vars(Update) if not name.startswith("_")]
    fields = ["counts", "tallies", "eager"]
    methods = ["structure", "refusal", "slots", "numbers", "scalars", "counter", "apply"]
    assert said == [*fields, *methods]
    assert carpool.kernels.updates.__all__ == [
        "UNFUSED",
        "UPDATES",
        "Columns",
        "Options",
        "Update",
        "clipped",
        "number_dtype",
        "register",
    ]


class Halving(torch.optim.Optimizer):
    """An optimizer nobody registers."""


class HalvingUpdate(Update):
    hypers = ("lr",)

    def apply(self, weight, grad, slots, columns, options) -> list[Tensor]:
        return [weight / 2]


class Nameless(HalvingUpdate):
    hypers = ()


@pytest.mark.parametrize(
    ("optimizer", "update", "expected"),
    [
        (torch.nn.Linear, HalvingUpdate(), "derived from torch.optim.Optimizer"),
        (Halving.__new__(Halving), HalvingUpdate(), "derived from torch.optim.Optimizer"),
        (Halving, HalvingUpdate, "an instance of carpool.kernels.updates.Update"),
        (Halving, Nameless(), "names its hyper-parameters"),
        (torch.optim.Adam, HalvingUpdate(), "Received: Adam, which Adam updates"),
    ],
    ids=["no optimizer", "no class", "no instance", "no hypers", "taken"],
)
def test_a_wrong_registration_is_refused(optimizer: Any, update: Any, expected: str):
    before = dict(UPDATES)
    with pytest.raises(OptionError, match=expected):
        register(optimizer, update)
    assert before == UPDATES


def test_a_class_is_registered_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("carpool.kernels.updates.table.UPDATES", dict(UPDATES))
    register(Halving, HalvingUpdate())
    with pytest.raises(OptionError, match="Halving, which HalvingUpdate updates"):
        register(Halving, HalvingUpdate())
