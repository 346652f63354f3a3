"""One member's step traced by itself, as operators without memory: what `kernels/resident` makes loops of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.func import functionalize, grad
from torch.fx import Graph

from carpool.adapters.torch.bits import lowest_behind
from carpool.adapters.torch.faking import unlogged
from carpool.adapters.torch.precision import WideNorms
from carpool.adapters.torch.probe import Stepped, call
from carpool.adapters.torch.rowwise import by_row
from carpool.adapters.torch.stacked import Recipe, beneath_grad, evaluation_step
from carpool.adapters.torch.tracing import graph_of
from carpool.kernels.resident.lower import LOWERINGS
from carpool.kernels.table import single
from carpool.kernels.updates import Update

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Traced:
    """A graph of operators; `inputs` and `outputs` are the names of what goes in and comes out, in order."""

    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def operators(self) -> int:
        return sum(node.op == "call_function" for node in self.graph.nodes)

    @property
    def lowest(self) -> torch.dtype:
        """The least precise type that it computes in."""
        return lowest_behind(self.graph.output_node().all_input_nodes)


def training_step(recipe: Recipe, size: int, tensors: Tensors) -> Traced:
    """Gradients by leaf, "shown", and buffers as they are afterwards, of one member's batch of `size`."""
    phase, layout = recipe.phases[0], recipe.layout
    module = Stepped(recipe.training, phase.step)
    own = layout.names_of(0)
    examples = _examples(recipe, size, tensors)
    buffers = [name for name in examples if name.startswith("buffer:")]

    def member(learning: dict[str, Tensor], rest: dict[str, Tensor]) -> Any:
        leaves = {
            name.partition(":")[2]: leaf.clone() if name.startswith("buffer:") else leaf
            for name, leaf in rest.items()
            if name.startswith(_LEAVES)
        }
        with single(rest["seed"], rest["step"]), WideNorms():
            batch = [tensor for name, tensor in rest.items() if name.startswith("data:")]
            values, after = call(module, {**leaves, **learning}, recipe.batch(batch), rest["place"])
        shown = torch.stack([values[name].detach().to(torch.float64) for name in phase.values])
        loss = values[phase.values[0]] / recipe.accumulate
        return loss, (shown, [after[name.removeprefix("buffer:")].detach() for name in buffers])

    def step(*inputs: Tensor) -> list[Tensor]:
        given = dict(zip(examples, inputs, strict=True))
        learning = {name: given.pop(f"leaf:{name}") for name in own}
        # Row by row refuses random numbers that are not keyed, as in a stack of few.
        alone = by_row(lambda _: grad(member, has_aux=True)(learning, given), (0,), apart=True)
        slopes, (shown, after) = alone(torch.zeros(1))
        return [tensor[0] for tensor in (*(slopes[name] for name in own), shown, *after)]

    outputs = (*(f"grad:{name}" for name in own), "shown", *buffers)
    return Traced(graph_without_memory(step, examples), tuple(examples), outputs)


def evaluating_step(recipe: Recipe, size: int, tensors: Tensors) -> Traced:
    """ "shown" of one member's validation batch."""
    module = Stepped(recipe.evaluating, recipe.evaluate)
    examples = _examples(recipe, size, tensors)

    def step(*inputs: Tensor) -> list[Tensor]:
        given = dict(zip(examples, inputs, strict=True))
        leaves = {
            name.partition(":")[2]: leaf.clone() if name.startswith("buffer:") else leaf
            for name, leaf in given.items()
            if name.startswith(("leaf:", *_LEAVES))
        }
        batch = [tensor for name, tensor in given.items() if name.startswith("data:")]
        at = evaluation_step(given["step"], given["place"])

        def shown(_: Tensor) -> Tensor:
            with single(given["seed"], at), WideNorms():
                values, _ = call(module, leaves, recipe.validation_batch(batch), given["place"])
            return torch.stack([values[name].to(torch.float64) for name in recipe.evaluated])

        return [by_row(beneath_grad(shown), (0,), apart=True)(torch.zeros(1))[0]]

    return Traced(graph_without_memory(step, examples), tuple(examples), ("shown",))


_LEAVES = ("fixed:", "buffer:", "shared:")


def _examples(recipe: Recipe, size: int, tensors: Tensors) -> dict[str, Tensor]:
    """Tensors of the shapes that one member's step sees, by name."""
    made = {
        f"leaf:{leaf.name}": torch.empty(leaf.shape, dtype=recipe.layout.dtype)
        for leaf in recipe.layout.leaves
    }
    for name, tensor in tensors.items():
        if name.startswith(("fixed:", "buffer:")):
            made[name] = torch.empty(tensor.shape[1:], dtype=tensor.dtype)
        elif name.startswith("shared:"):
            made[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        elif name.startswith("data:"):
            made[name] = torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)
    return made | {name: torch.zeros((), dtype=torch.int64) for name in ("seed", "step", "place")}


def graph_without_memory(step: Callable[..., Any], examples: Tensors) -> Graph:
    """What a step does with such tensors, in operators that change nothing."""
    pure = functionalize(step, remove="mutations")
    with unlogged():
        traced = graph_of(pure, *examples.values(), table=_decompositions())
    traced.graph.eliminate_dead_code()
    return traced.graph


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    more = [
        aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_batch_norm,
        aten.native_batch_norm_backward, aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training,
        aten._native_batch_norm_legit_functional, aten.native_group_norm, aten.native_group_norm_backward,
        aten.addmv, aten.mse_loss, aten.mse_loss_backward, aten.l1_loss, aten.smooth_l1_loss,
        aten.smooth_l1_loss_backward, aten.huber_loss, aten.huber_loss_backward, aten.binary_cross_entropy,
        aten.binary_cross_entropy_backward, aten.binary_cross_entropy_with_logits, aten.linalg_vector_norm,
        aten.norm, aten.std, aten.var, aten.logsumexp, aten.glu, aten.glu_backward, aten.mish_backward,
        aten.hardswish, aten.hardswish_backward, aten.hardsigmoid, aten.hardsigmoid_backward,
        aten.hardtanh_backward, aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.soft_margin_loss,
        aten.prelu, aten._prelu_kernel, aten._prelu_kernel_backward, aten.celu, aten.selu, aten.mish,
        aten.xlogy, aten.special_xlog1py, aten.logaddexp, aten.addr, aten.trace, aten.new_zeros, aten.zero,
    ]  # fmt: skip
    table = {**core_aten_decompositions(), **get_decompositions(more)}
    return {operator: way for operator, way in table.items() if str(operator) not in LOWERINGS}


@dataclass(frozen=True)
class TracedUpdate:
    """An update's arithmetic on one element: weight, gradient, slots, tallies and columns to new weight, slots and tallies."""

    graph: Graph
    slots: int
    tallies: int
    columns: int


_updates: dict[Hashable, TracedUpdate] = {}


def traced_update(
    update: Update, options: Mapping[str, Any], slots: int, columns: int, dtype: torch.dtype, wide: torch.dtype,
    tally: torch.dtype,
) -> TracedUpdate:  # fmt: skip
    """Traced once for the process."""
    key = (update, tuple(sorted(options.items())), slots, columns, dtype, wide, tally)
    if key not in _updates:
        tallies = len(update.tallies)

        def apply(*given: Tensor) -> list[Tensor]:
            weight, gradient, *rest = given
            held, numbers = rest[: slots + tallies], rest[slots + tallies :]
            return update.apply(weight, gradient, held, numbers, options)

        like = [torch.empty(1, dtype=dtype) for _ in range(2 + slots)]
        like += [torch.empty(1, dtype=tally) for _ in range(tallies)]
        like += [torch.empty(1, dtype=wide) for _ in range(columns)]
        table: dict[Any, Any] = dict(core_aten_decompositions())
        table = {operator: way for operator, way in table.items() if str(operator) not in LOWERINGS}
        _updates[key] = TracedUpdate(graph_of(apply, *like, table=table).graph, slots, tallies, columns)
    return _updates[key]
