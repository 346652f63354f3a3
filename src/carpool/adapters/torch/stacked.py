"""The arithmetic of one fused step, as a pure recipe over named tensors. Traced and compiled in `program.py`.

A step gathers each member's batch on the device, takes the gradient of the member's objective for all rows (`rowwise.py`), updates the stack, and
writes everything back under a mask: a row that is not active, or whose loss is not finite, keeps every bit it had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

from carpool.adapters.torch.build import Step
from carpool.adapters.torch.layout import Layout
from carpool.adapters.torch.precision import WideNorms, untouched
from carpool.adapters.torch.probe import Stepped, call
from carpool.adapters.torch.rowwise import by_row
from carpool.kernels.table import batched_or_refused, stacked
from carpool.kernels.updates import clipped

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class PhaseRecipe:
    """One update of a step: its objective and what that shows, its loss first."""

    step: Step
    values: tuple[str, ...]
    every: int


@dataclass(frozen=True)
class Recipe:
    """What a structure's steps need besides tensors."""

    layout: Layout
    training: nn.Module
    evaluating: nn.Module
    phases: tuple[PhaseRecipe, ...]
    evaluate: Step
    batch: Callable[[Sequence[Tensor]], Any]
    validation_batch: Callable[[Sequence[Tensor]], Any]
    evaluated: tuple[str, ...]
    clips: bool
    accumulate: int
    precision: str
    shared: frozenset[str] = frozenset()
    """Leaves that are one tensor for all members."""
    alike: bool = False
    """Whether all members read the same batches."""
    apart: bool = False
    """Whether members are traced one by one. As the stack was opened: members that leave later change no bit."""
    innermost: bool = False
    """Whether training computes convolutions with channels innermost in memory."""

    @property
    def sharing(self) -> Hashable:
        """What a step has baked in of what its members have in common."""
        return (tuple(sorted(self.shared)), self.alike, self.apart, self.innermost)

    @property
    def values(self) -> tuple[str, ...]:
        """What a training step shows, the loss first."""
        own = tuple(name for phase in self.phases for name in phase.values)
        return own if own[0] == "loss" else ("loss", *own)


def train_step(recipe: Recipe, size: int) -> Callable[[Tensors], None]:
    """A step on batches of `size`: changes the tensors it is given in place."""

    def step(t: Tensors) -> None:
        with untouched(recipe.precision, t["weights"].device.type):
            take(t)

    def take(t: Tensors) -> None:
        batch = _gather(t, size, recipe.alike)
        place = t["batch"] + t["k"]
        due = t["due"].index_select(1, t["k"].view(1))[:, 0]
        moved = t["active"] & t["alive"]
        parts: list[Tensor] = []
        for number in range(len(recipe.phases)):
            moved, shown = _take_phase(recipe, number, t, batch, place, moved, due[:, number])
            parts.append(shown)
        shown = _shown(recipe, parts)
        t["sums"].add_(torch.where(moved[:, None], shown * size, 0.0))
        t["taken"].add_(moved)
        t["steps"].add_(moved)
        t["alive"].copy_(t["alive"] & (moved | ~t["active"]))
        t["k"].add_(1)

    return step


def _take_phase(
    recipe: Recipe, number: int, t: Tensors, batch: list[Tensor], place: Tensor, moved: Tensor, due: Tensor
) -> tuple[Tensor, Tensor]:
    """One update of a step: the rows that go on, and what the phase showed. A phase that sits out changes no bit."""
    phase, layout = recipe.phases[number], recipe.layout
    module = Stepped(recipe.training, phase.step)

    def member(
        learning: Tensors,
        fixed: Tensors,
        buffers: Tensors,
        batch: list[Tensor],
        seed: Tensor,
        step: Tensor,
        place: Tensor,
    ) -> Any:
        with stacked(seed, step, number, recipe.innermost), WideNorms():
            leaves = {**learning, **fixed, **buffers, **shared}
            values, after = call(module, leaves, recipe.batch(batch), place)
        shown = torch.stack([values[name].detach().to(torch.float64) for name in phase.values])
        loss = values[phase.values[0]] / recipe.accumulate
        return loss, (shown, {name: after[name].detach() for name in buffers})

    own, shared = layout.names_of(number), _prefixed(t, "shared:")
    weights, buffers = layout.views(t["weights"]), _prefixed(t, "buffer:")
    fixed = _prefixed(t, "fixed:") | {name: leaf for name, leaf in weights.items() if name not in own}
    trial = {name: buffer.clone() for name, buffer in buffers.items()}
    learning = {name: leaf for name, leaf in weights.items() if name in own}
    in_dims = (0, 0, 0, None if recipe.alike else 0, 0, 0, 0)
    gradient = by_row(grad(member, has_aux=True), in_dims, recipe.apart)
    with batched_or_refused():
        grads, (shown, after) = gradient(learning, fixed, trial, batch, t["seeds"], t["steps"], place)
    runs = due if phase.every > 1 else torch.ones_like(due)
    moved = moved & (torch.isfinite(shown[:, 0]) | ~runs)
    ran, due = moved & runs, moved & due
    update_rows(recipe, number, t, _gathered(t, layout.flat(grads, number), ran, due), due)
    for name, buffer in buffers.items():
        buffer.copy_(torch.where(_beside(ran, buffer), after[name], buffer))
    if phase.every > 1:
        at = sum(len(earlier.values) for earlier in recipe.phases[:number])
        last = t["last"][:, at : at + len(phase.values)]
        shown = torch.where(ran[:, None], shown, last)
        last.copy_(shown)
    return moved, shown


def _shown(recipe: Recipe, parts: Sequence[Tensor]) -> Tensor:
    """What a step shows: its phases' values, and before them the sum of their losses."""
    if len(parts) == 1 and recipe.phases[0].values[0] == "loss":
        return parts[0]
    total = torch.stack([part[:, 0] for part in parts]).sum(0)
    return torch.cat([total[:, None], *parts], 1)


def evaluate_step(recipe: Recipe, size: int, shared: bool) -> Callable[[Tensors], None]:
    """A validation batch of `size`; `shared` when every member reads the same samples."""
    module = Stepped(recipe.evaluating, recipe.evaluate)

    def member(
        once: Tensors, leaves: Tensors, batch: list[Tensor], seed: Tensor, step: Tensor, number: Tensor
    ) -> Tensor:
        # Channels stay where they are: only training was tried with them innermost.
        with stacked(seed, step), WideNorms():
            values, _ = call(module, {**leaves, **once}, recipe.validation_batch(batch), number)
        return torch.stack([values[name].to(torch.float64) for name in recipe.evaluated])

    def step(t: Tensors) -> None:
        leaves = (
            recipe.layout.views(t["weights"])
            | _prefixed(t, "fixed:")
            | {name: buffer.clone() for name, buffer in _prefixed(t, "buffer:").items()}
        )
        batch = _gather(t, size, shared)
        number = t["batch"] + t["k"]
        place = evaluation_step(t["steps"], number)
        in_dims = (None, 0, None if shared else 0, 0, 0, 0)
        shown = by_row(beneath_grad(member), in_dims, recipe.apart)(
            _prefixed(t, "shared:"), leaves, batch, t["seeds"], place, number
        )
        t["sums"].add_(torch.where(t["active"][:, None], shown * size, 0.0))
        t["taken"].add_(t["active"])
        t["k"].add_(1)

    return step


def beneath_grad(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function at the level of a gradient that nobody takes.

    There autocast casts a layer's inputs before vmap takes the layer apart, as in training and as in a job alone;
    right beneath vmap only the matrix product inside would be cast, and not the bias.
    """

    def run(*inputs: Any) -> Tensor:
        unused = torch.zeros(())
        return grad(lambda x, *args: (x, function(*args)), has_aux=True)(unused, *inputs)[1]

    return run


def evaluation_step(step: Any, batch: Any) -> Any:
    """What keys the random numbers of a validation batch: no training step has such a number."""
    return step + ((batch + 1) << 32)


def _gather(t: Tensors, size: int, alike: bool) -> list[Tensor]:
    """Each member's batch, [members, size, ...], or the one that all of them read.

    Of few tensors, so that the compiler computes the places where they are read, and writes none of them down.
    """
    first = t["first"][0] if alike else t["first"][:, None]
    places = first + (t["k"] * size + torch.arange(size, device=first.device))
    index = t["order"].view(-1)[places].to(torch.int64)
    return [array[index] for array in _prefixed(t, "data:").values()]


def _gathered(t: Tensors, grads: Tensor, moved: Tensor, due: Tensor) -> Tensor:
    """The gradients since the last update, these included; rows that are due start again at zero."""
    if "gathered" not in t:
        return grads
    total = t["gathered"] + grads
    kept = torch.where(due[:, None], 0.0, total)
    t["gathered"].copy_(torch.where(moved[:, None], kept, t["gathered"]))
    return total


def update_rows(recipe: Recipe, phase: int, t: Tensors, grads: Tensor, due: Tensor) -> None:
    """A phase's update of the rows that are due, from gradients that are clipped first where jobs say so."""
    if recipe.clips:
        grads = clipped(grads, t["clip"].to(grads.dtype)[:, None])
    scalars = t["table"].index_select(1, t["k"].view(1))[:, 0]
    mask = due[:, None]
    first = recipe.layout.spans_of(phase)[0].start
    for number, span in enumerate(recipe.layout.spans):
        if span.phase != phase:
            continue
        t["updates"][:, number].add_(due)
        if not span.leaves:
            continue
        part, own = slice(span.start, span.stop), slice(span.start - first, span.stop - first)
        columns = [column[:, None] for column in scalars[:, number, : span.num_columns].unbind(-1)]
        old = [t["weights"][:, part], *(t[f"slot:{slot}"][:, part] for slot in span.slots)]
        old += [t[f"tally:{tally}"][:, number : number + 1] for tally, _ in span.update.tallies]
        new = span.update.apply(old[0], grads[:, own], old[1:], columns, span.options)
        for before, after in zip(old, new, strict=True):
            before.copy_(torch.where(mask, after, before))


def _prefixed(t: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in t.items() if name.startswith(prefix)}


def _beside(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.view(-1, *(1,) * (tensor.dim() - 1))
