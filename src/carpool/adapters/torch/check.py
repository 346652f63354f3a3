"""A member's step alone, by ordinary autograd and its real optimizer, to hold a fused step against.

The member's own module runs (not the group's template), so a signature that was fooled shows here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from carpool.adapters.base import Check
from carpool.adapters.torch import precision
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.probe import Stepped, call
from carpool.adapters.torch.stacked import Recipe
from carpool.kernels.random import Keyed


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
        with Keyed(case.built.seed, case.step, number):
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
        _optimizer(recipe, case, number, own).step()
        row.leaves |= {name: leaf.detach() for name, leaf in own.items()}
    return Alone(loss, row.leaves, grads, largest_of, row.buffers)


def _optimizer(
    recipe: Recipe, case: Case, number: int, leaves: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """A real optimizer like the member's own for a phase over these leaves, with the row's state."""
    groups, states = [], {}
    slots = {s: recipe.layout.row(case.tensors[f"slot:{s}"]) for s in recipe.layout.slots}
    phase = case.built.phases[number]
    own = [{k: v for k, v in group.items() if k != "params"} for group in phase.optimizer.param_groups]
    places = [place for place, span in enumerate(recipe.layout.spans) if span.phase == number]
    counts = case.counts[places]
    for span, options, count in zip(recipe.layout.spans_of(number), own, counts, strict=True):
        if not span.leaves:
            continue
        groups.append({**options, "params": [leaves[leaf.name] for leaf in span.leaves]})
        for leaf in span.leaves:
            counter = {"step": torch.tensor(float(count))} if span.update.counts else {}
            states[leaves[leaf.name]] = counter | {s: slots[s][leaf.name].clone() for s in span.slots}
    make: Any = type(phase.optimizer)  # the options are all in the groups
    made: torch.optim.Optimizer = make(groups)
    for leaf, state in states.items():
        if state and any(counts > 0):
            made.state[leaf] = _placed(made, state, leaf)
    return made


def _placed(optimizer: torch.optim.Optimizer, state: dict[str, Any], leaf: Tensor) -> dict[str, Any]:
    on_device = optimizer.param_groups[0].get("capturable") or optimizer.param_groups[0].get("fused")
    return {name: t.to(leaf.device) if name != "step" or on_device else t for name, t in state.items()}


@dataclass(frozen=True)
class Tolerance:
    """How far apart two orders of summation may end up in one step.

    `weight` is relative to the leaf's largest weight. `noise` is relative to the largest gradient: below it an Adam
    step is the sign of a rounding error, so such elements are not compared.
    """

    weight: float
    noise: float


def tolerance(dtype: torch.dtype, device: torch.device, convolves: bool, lowered: bool = False) -> Tolerance:
    """The tolerance for a type, given the precision that the user's settings leave to matrix products.

    `lowered` says that autocast computes in 16 bits; it leaves float64 alone.
    """
    if dtype == torch.float64:
        return Tolerance(1e-9, 1e-12)
    loose = lowered or dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda":
        loose |= precision.multiplies_in_tf32() or (convolves and precision.convolves_in_tf32())
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
    device = together["weights"].device
    lowered = any(precision.computes_in_16_bits(b.job.precision, device.type) for b in members.values())
    allowed = tolerance(recipe.layout.dtype, device, convolves, lowered)
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
    for name, weight in recipe.layout.row(together["weights"][row]).items():
        counts = (
            own.grads[name].abs() > noise * own.largest[name]
            if name in own.grads
            else torch.ones_like(weight, dtype=torch.bool)
        )
        found.append((_relative(weight, own.weights[name], counts), repr(name)))
    for name, buffer in own.buffers.items():
        found.append(
            (
                _relative(together[f"buffer:{name}"][row], buffer, torch.ones_like(buffer, dtype=torch.bool)),
                repr(name),
            )
        )
    return max(found)


def _relative(a: Tensor, b: Tensor, counts: Tensor) -> float:
    if not a.numel():
        return 0.0
    gap = torch.where(counts, (a.double() - b.double()).abs(), 0.0)
    return float(gap.max() / b.double().abs().max().clamp(min=1.0 if not a.is_floating_point() else 1e-3))
