"""A member's step alone, by ordinary autograd and its real optimizer, to hold a fused step against.

The member's own module runs (not the group's template), so a signature that was fooled shows here.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from carpool.adapters.base import Check
from carpool.adapters.torch import precision
from carpool.adapters.torch.absorb import is_number
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.layout import Span
from carpool.adapters.torch.probe import Stepped, call
from carpool.adapters.torch.stacked import Recipe
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
    """What the step alone gave; `largest` is for each gradient the largest of its phase."""

    loss: float
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    largest: dict[str, float]
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


def try_step(recipe: Recipe, case: Case) -> Exception | None:
    """What the row's forward passes raise alone, or None."""
    try:
        with torch.no_grad():
            row = _Row.of(recipe, case)
            for number in range(len(recipe.phases)):
                row.forward(case, number)
    except Exception as error:
        return error
    return None


def solo_step(recipe: Recipe, case: Case) -> Alone:
    """The step alone: forward, backward, clipping and the real optimizer's own update, phase after phase."""
    row = _Row.of(recipe, case)
    loss, grads = 0.0, {}
    largest_of: dict[str, float] = {}
    slots: dict[str, dict[str, Any]] = {}
    for number, phase in enumerate(case.built.phases):
        own = {name: row.leaves[name].requires_grad_() for name in recipe.layout.names_of(number)}
        with torch.enable_grad(), precision.untouched(recipe.precision, case.tensors["weights"].device.type):
            values = row.forward(case, number)
            (values[phase.loss] / recipe.accumulate).backward()
        loss += values[phase.loss].item()
        found = {name: leaf.grad.clone() for name, leaf in own.items() if leaf.grad is not None}
        largest = max((float(grad.abs().max()) for grad in found.values() if grad.numel()), default=0.0)
        grads |= found
        largest_of |= dict.fromkeys(found, largest)
        if case.built.job.clip_norm is not None:
            clip_grad_norm_(own.values(), case.built.job.clip_norm)
        optimizer = twin_optimizer(recipe, case, number, own)
        optimizer.step()
        for name in found:
            held = optimizer.state[own[name]].items()
            slots[name] = {slot: value for slot, value in held if value is not None}
        row.leaves |= {name: leaf.detach() for name, leaf in own.items()}
    return Alone(loss, row.leaves, grads, largest_of, row.buffers, slots)


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


@dataclass(frozen=True)
class Tolerance:
    """How far apart two orders of summation may end up in one step.

    `weight` is relative to the leaf's largest weight. `noise` is relative to the largest gradient: below it an Adam
    step is the sign of a rounding error, so such elements are not compared.
    """

    weight: float
    noise: float


def tolerance(
    dtype: torch.dtype,
    device: torch.device,
    convolves: bool,
    recurs: bool = False,
    lowered: bool = False,
) -> Tolerance:
    """The tolerance for a type, given the precision that the user's settings leave to matrix products.

    `lowered` says that autocast computes in 16 bits; it leaves float64 alone.
    """
    if dtype == torch.float64:
        return Tolerance(1e-9, 1e-12)
    loose = lowered or dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda":
        loose |= precision.multiplies_in_tf32() or (convolves and precision.convolves_in_tf32())
        loose |= recurs and precision.recurs_in_tf32()
    return Tolerance(1e-2, 5e-2) if loose else Tolerance(1e-4, 1e-5)


def compare(
    recipe: Recipe,
    size: int,
    alone: Mapping[int, Alone],
    together: Mapping[str, Tensor],
    members: Mapping[int, Built],
) -> Check:
    """The largest difference, and the first member beyond the tolerance, in words."""
    worst, mismatch = 0.0, None
    convolves = any(len(leaf.shape) > 2 for leaf in recipe.layout.leaves)
    recurs = any(isinstance(module, nn.RNNBase) for module in recipe.training.modules())
    device = together["weights"].device
    lowered = any(precision.computes_in_16_bits(b.job.precision, device.type) for b in members.values())
    allowed = tolerance(recipe.layout.dtype, device, convolves, recurs, lowered)
    for row, own in alone.items():
        difference, place = _difference(recipe, size, row, own, together, allowed.noise)
        worst = max(worst, difference)
        if not difference <= allowed.weight and mismatch is None:
            mismatch = (
                f"the fused step of {members[row].job.name!r} differs from its step alone at {place} "
                f"by {difference:.1e} (allowed: {allowed.weight:.0e})"
            )
    return Check(len(alone), worst, mismatch)


def _difference(
    recipe: Recipe, size: int, row: int, own: Alone, together: Mapping[str, Tensor], noise: float
) -> tuple[float, str]:
    if not np.isfinite(own.loss):
        return 0.0, "loss"  # it diverged at once, alone as well; the mask leaves the row as it was
    loss = float(together["sums"][row, 0]) / size
    found = [(abs(loss - own.loss) / max(1.0, abs(own.loss)), "loss")]
    sound = {name: grad.abs() > noise * own.largest[name] for name, grad in own.grads.items()}
    for name, weight in recipe.layout.row(together["weights"][row]).items():
        counts = sound.get(name, torch.ones_like(weight, dtype=torch.bool))
        found.append((_relative(weight, own.weights[name], counts), repr(name)))
    found += _slot_differences(recipe, row, own, together, sound)
    for name, buffer in own.buffers.items():
        found.append(
            (
                _relative(together[f"buffer:{name}"][row], buffer, torch.ones_like(buffer, dtype=torch.bool)),
                repr(name),
            )
        )
    return max(found)


def _slot_differences(
    recipe: Recipe, row: int, own: Alone, together: Mapping[str, Tensor], sound: Mapping[str, Tensor]
) -> list[tuple[float, str]]:
    """How far apart the optimizers' slots are: an update that leaves a wrong slot errs only in the steps to come."""
    found: list[tuple[float, str]] = []
    for number, span in enumerate(recipe.layout.spans):
        for name in (leaf.name for leaf in span.leaves if leaf.name in own.slots):
            kept, held = _kept(span, own.weights[name]), _described(span, own.slots[name])
            if kept != held:
                return [(np.inf, f"the optimizer's state of {name!r} (fused: {kept}; alone: {held})")]
            for tally, _ in span.update.tallies:
                value, expected = (
                    float(together[f"tally:{tally}"][row, number]),
                    float(own.slots[name][tally]),
                )
                found.append((abs(value - expected) / max(1.0, abs(expected)), f"{tally!r} of {name!r}"))
    tiny = torch.finfo(recipe.layout.dtype).tiny
    for phase, slot in itertools.product(range(len(recipe.phases)), recipe.layout.slots):
        names = [name for name in recipe.layout.names_of(phase) if slot in own.slots.get(name, {})]
        values = {name: own.slots[name][slot] for name in names}
        # Rounding is relative to the largest gradient of all leaves; ten times as much, because slots hold squares.
        scale = 10 * max(
            (float(value.abs().max()) for value in values.values() if value.numel()), default=0.0
        )
        fused = recipe.layout.row(together[f"slot:{slot}"][row])
        for name, value in values.items():
            gap = torch.where(sound[name], (fused[name].double() - value.double()).abs(), 0.0)
            far = float(gap.max()) / max(scale, tiny) if gap.numel() else 0.0
            found.append((far, f"{slot!r} of {name!r}"))
    return found


def _kept(span: Span, weight: Tensor) -> dict[str, str]:
    """What a parameter's state will be after the fused run, name by name."""
    update = span.update
    counter = {"step": update.counter(1.0)} if update.counts else {}
    tallies = {name: torch.tensor(start) for name, start in update.tallies}
    return _described(span, counter | tallies | dict.fromkeys(span.slots, weight))


def _described(span: Span, slots: Mapping[str, Any]) -> dict[str, str]:
    """Types, and of slots the shapes: of a number only whether it is a tensor, for fused optimizers count in float32."""
    return {
        name: f"{tuple(slot.shape)} {str(slot.dtype).removeprefix('torch.')}"
        if isinstance(slot, Tensor) and name in span.slots
        else type(slot).__name__
        for name, slot in sorted(slots.items())
    }


_STRAYS = 1e-4  # of a tensor's elements: a ReLU at zero, or a gradient that is, may fall to either side in single precision


def _relative(a: Tensor, b: Tensor, counts: Tensor) -> float:
    if not a.numel():
        return 0.0
    gap = torch.where(counts, (a.double() - b.double()).abs(), 0.0)
    strays = int(gap.numel() * _STRAYS) if a.dtype != torch.float64 else 0
    worst = gap.flatten().topk(strays + 1).values[-1] if strays else gap.max()
    return float(worst / b.double().abs().max().clamp(min=1.0 if not a.is_floating_point() else 1e-3))
