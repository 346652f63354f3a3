"""The arithmetic of one stacked step in the user's own loop, as a pure recipe over named tensors.

It differs from `stacked.py` in where things come from: the batch is given, not gathered, and is one for all members or
one for each; the update's scalars are computed inside, from the hyper-parameters and counts of this very step; leaves
that are one object in all members ("shared:") are not stacked, so what only they determine is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from carpool.adapters.torch.inputs import Inputs
from carpool.adapters.torch.layout import Layout
from carpool.adapters.torch.precision import WideNorms
from carpool.adapters.torch.probe import Stepped, call
from carpool.adapters.torch.stacked import Recipe, evaluation_step, update_rows
from carpool.kernels.table import stacked

Tensors = dict[str, Tensor]

_PLACE = 0  # the number of a batch in its epoch: in the user's own loop there are no epochs


def own_train_step(recipe: Recipe, each: bool) -> Callable[[Tensors], None]:
    """Forward, backward, clipping and update of all active rows; a row whose loss is not finite keeps every bit."""
    module = Stepped(recipe.training, recipe.phases[0].step)

    def step(t: Tensors) -> None:
        shared = prefixed(t, "shared:")

        def member(
            learning: Tensors, fixed: Tensors, buffers: Tensors, batch: list[Tensor], seed: Tensor, at: Tensor
        ) -> Any:
            with stacked(seed, at), WideNorms():
                leaves = {**learning, **fixed, **buffers, **shared}
                values, after = call(module, leaves, recipe.batch(batch), _PLACE)
            loss = values["loss"]
            return loss, (loss.detach().to(torch.float64), {n: after[n].detach() for n in buffers})

        learning, buffers = recipe.layout.views(t["weights"]), prefixed(t, "buffer:")
        trial = {name: buffer.clone() for name, buffer in buffers.items()}
        batch = list(prefixed(t, "data:").values())
        grads, (losses, after) = vmap(
            grad(member, has_aux=True), in_dims=(0, 0, 0, 0 if each else None, 0, 0)
        )(learning, prefixed(t, "fixed:"), trial, batch, t["seeds"], t["steps"])
        moved = t["active"] & torch.isfinite(losses)
        table = _table(recipe.layout, t["numbers"], (t["updates"] + 1).to(torch.float64))
        update_rows(recipe, 0, {**t, "table": table}, recipe.layout.flat(grads), moved)
        for name, buffer in buffers.items():
            mask = moved.view(-1, *(1,) * (buffer.dim() - 1))
            buffer.copy_(torch.where(mask, after[name], buffer))
        t["losses"].copy_(torch.where(t["active"], losses, torch.nan))
        t["steps"].add_(moved)

    return step


def own_evaluate_step(recipe: Recipe, each: bool) -> Callable[[Tensors], None]:
    """The loss of every row in evaluation mode; nothing but the losses changes."""
    module = Stepped(recipe.evaluating, recipe.evaluate)

    def step(t: Tensors) -> None:
        shared = prefixed(t, "shared:")

        def member(leaves: Tensors, batch: list[Tensor], seed: Tensor, at: Tensor) -> Tensor:
            with stacked(seed, at), WideNorms():
                values, _ = call(module, {**leaves, **shared}, recipe.batch(batch), _PLACE)
            return values["loss"].to(torch.float64)

        batch = list(prefixed(t, "data:").values())
        at = evaluation_step(t["steps"], 0)
        losses = vmap(member, in_dims=(0, 0 if each else None, 0, 0))(
            stacked_leaves(recipe.layout, t), batch, t["seeds"], at
        )
        t["losses"].copy_(losses)

    return step


def own_predictions(model: nn.Module, layout: Layout, t: Tensors, inputs: Inputs, each: bool) -> Any:
    """Every row's outputs; what cannot be vmapped is computed row by row."""
    shared = prefixed(t, "shared:")

    def member(leaves: Tensors, tensors: list[Tensor], seed: Tensor, at: Tensor) -> Any:
        arguments, keywords = inputs.holding(tensors).arguments()
        with stacked(seed, at):
            return functional_call(model, {**leaves, **shared}, arguments, keywords)

    leaves, at = stacked_leaves(layout, t), evaluation_step(t["steps"], 0)
    try:
        return vmap(member, in_dims=(0, 0 if each else None, 0, 0))(leaves, inputs.tensors, t["seeds"], at)
    except Exception:
        made = [
            member(
                {name: leaf[row] for name, leaf in leaves.items()},
                [tensor[row] if each else tensor.clone() for tensor in inputs.tensors],
                t["seeds"][row],
                at[row],
            )
            for row in range(len(at))
        ]
        return pytree.tree_map(lambda *outputs: torch.stack(outputs), *made)


def stacked_leaves(layout: Layout, t: Tensors) -> Tensors:
    """Every leaf that has rows, by name; buffers are copies, so that a forward pass may write into them."""
    buffers = {name: buffer.clone() for name, buffer in prefixed(t, "buffer:").items()}
    return layout.views(t["weights"]) | prefixed(t, "fixed:") | buffers


def _table(layout: Layout, numbers: Tensor, ordinals: Tensor) -> Tensor:
    """The update's scalars, as `hypers.columns` makes them for a chunk of one step: [members, 1, groups, columns]."""
    update = layout.spans[0].update  # one optimizer, so all groups have one update
    named = {name: numbers[..., i] for i, name in enumerate(update.hypers)}
    made = update.scalars(named, ordinals)
    wide = torch.float64 if layout.dtype == torch.float64 else torch.float32
    return torch.stack(torch.broadcast_tensors(*made), dim=-1)[:, None].to(wide)


def prefixed(t: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in t.items() if name.startswith(prefix)}
