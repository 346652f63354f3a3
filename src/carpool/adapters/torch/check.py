"""A member's step alone, by ordinary autograd and its real optimizer, to hold a fused step against.

The member's own module runs (not the group's template), so a signature that was fooled shows here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from carpool.adapters.torch import precision
from carpool.adapters.torch.absorb import is_number
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.probe import Stepped, call
from carpool.adapters.torch.stacked import Recipe
from carpool.errors import failure
from carpool.kernels.table import lent


@dataclass(frozen=True)
class Case:
    """One row before a step: its job, tensors and batch, the updates its groups have had, its step, its batch's number."""

    built: Built
    tensors: Mapping[str, Tensor]
    data: Sequence[Tensor]
    counts: np.ndarray
    step: int
    place: int


@dataclass(frozen=True)
class Alone:
    """What the step alone gave, where it was computed; `largest` is for each gradient the largest of its phase."""

    loss: Tensor
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    largest: dict[str, Tensor]
    buffers: dict[str, Tensor]
    slots: dict[str, dict[str, Any]]


@dataclass
class _Row:
    """A row's tensors on their way through the phases of a step."""

    leaves: dict[str, Tensor]
    others: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, recipe: Recipe, case: Case) -> _Row:
        leaves = {name: t.detach().clone() for name, t in recipe.layout.row(case.tensors["weights"]).items()}
        named = {name.partition(":"): t for name, t in case.tensors.items()}
        others = {leaf: t for (kind, _, leaf), t in named.items() if kind in ("fixed", "buffer")}
        return cls(leaves, others, {})

    def forward(self, case: Case, number: int) -> dict[str, Tensor]:
        """The values of a phase; the buffers are then as it left them."""
        module = Stepped(case.built.model, case.built.phases[number].step)
        with lent(case.built.seed, case.step, number):
            batch = case.built.data.batch(list(case.data))
            values, buffers = call(module, {**self.leaves, **self.others}, batch, case.place)
        self.buffers = {name: buffer.detach() for name, buffer in buffers.items()}
        self.others |= self.buffers
        return values


def try_step(recipe: Recipe, case: Case) -> BaseException | None:
    """What the row's forward passes raise alone, or None."""
    try:
        with torch.no_grad():
            row = _Row.of(recipe, case)
            for number in range(len(recipe.phases)):
                row.forward(case, number)
    except BaseException as error:
        failure(error)
        return error
    return None


def solo_step(recipe: Recipe, case: Case) -> Alone:
    """The step alone: forward, backward, clipping and the real optimizer's own update, phase after phase. The host need not wait."""
    row = _Row.of(recipe, case)
    loss = torch.zeros((), dtype=torch.float64, device=case.tensors["weights"].device)
    grads: dict[str, Tensor] = {}
    largest_of: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Any]] = {}
    for number, phase in enumerate(case.built.phases):
        own = {name: row.leaves[name].requires_grad_() for name in recipe.layout.names_of(number)}
        with torch.enable_grad(), precision.untouched(recipe.precision, case.tensors["weights"].device.type):
            values = row.forward(case, number)
            (values[phase.loss] / recipe.accumulate).backward()
        loss = loss + values[phase.loss].detach().to(torch.float64)
        found = {name: leaf.grad.clone() for name, leaf in own.items() if leaf.grad is not None}
        grads |= found
        largest_of |= dict.fromkeys(found, _largest(found.values()))
        if case.built.job.clip_norm is not None:
            clip_grad_norm_(own.values(), case.built.job.clip_norm)
        optimizer = twin_optimizer(recipe, case, number, own)
        optimizer.step()
        for name in found:
            held = optimizer.state[own[name]].items()
            slots[name] = {slot: value for slot, value in held if value is not None}
        row.leaves |= {name: leaf.detach() for name, leaf in own.items()}
    return Alone(loss, row.leaves, grads, largest_of, row.buffers, slots)


@dataclass(frozen=True)
class Strict:
    """What a step alone gives in full precision, and the weights before it."""

    step: Alone
    before: Mapping[str, Tensor]


def strict_step(recipe: Recipe, case: Case) -> Strict:
    """The same in full precision, whatever the settings and the job say."""
    with precision.strictly():
        return Strict(solo_step(recipe, case), recipe.layout.row(case.tensors["weights"]))


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value in any of them, infinite ones left out."""
    each = [torch.where(tensor.isfinite(), tensor.abs(), 0.0).max() for tensor in tensors if tensor.numel()]
    return torch.stack(each).max() if each else torch.zeros(())


def twin_optimizer(
    recipe: Recipe, case: Case, number: int, leaves: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """A real optimizer like the member's own for a phase over these leaves, with the row's state."""
    groups, states = [], {}
    slots = {s: recipe.layout.row(case.tensors[f"slot:{s}"]) for s in recipe.layout.slots}
    phase, update = case.built.phases[number], recipe.layout.spans_of(number)[0].update
    own = [{k: v for k, v in group.items() if k != "params"} for group in phase.optimizer.param_groups]
    places = [place for place, span in enumerate(recipe.layout.spans) if span.phase == number]
    for place, options in zip(places, own, strict=True):
        span = recipe.layout.spans[place]
        if not span.leaves:
            continue
        groups.append({**options, "params": [leaves[leaf.name] for leaf in span.leaves]})
        for leaf in span.leaves:
            counter = {"step": update.counter(float(case.counts[place]))} if update.counts else {}
            counter |= {name: case.tensors[f"tally:{name}"][place].clone() for name, _ in update.tallies}
            states[leaves[leaf.name]] = counter | {s: slots[s][leaf.name].clone() for s in span.slots}
    made = _twin(phase.optimizer, groups)
    for leaf, state in states.items():
        if state and (update.eager or any(case.counts[places] > 0)):
            made.state[leaf] = _placed(made, state, leaf)
    return made


def _twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer like this one over other leaves, without state.

    Not made by calling its class: a constructor may ask for more than the groups hold. The `step` of an instance is
    what a scheduler has wrapped, and would step the user's own optimizer.
    """
    made = object.__new__(type(optimizer))
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made.param_groups, made.state = groups, defaultdict(dict)
    return made


def _placed(optimizer: torch.optim.Optimizer, state: dict[str, Any], leaf: Tensor) -> dict[str, Any]:
    on_device = optimizer.param_groups[0].get("capturable") or optimizer.param_groups[0].get("fused")
    return {
        name: t.to("cpu" if is_number(optimizer, name) and not on_device else leaf.device)
        if isinstance(t, Tensor)
        else t
        for name, t in state.items()
    }
