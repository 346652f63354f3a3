"""One member's forward pass in evaluation mode as machine code: traced, lowered to loops, printed as C.

`predicting.py` decides when predictions run so, and calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from carpool import machine
from carpool.adapters.torch.inputs import Inputs
from carpool.adapters.torch.member import Traced, graph_without_memory
from carpool.adapters.torch.precision import WideNorms
from carpool.adapters.torch.resident import Code
from carpool.adapters.torch.rowwise import by_row
from carpool.adapters.torch.signature import model_signature
from carpool.adapters.torch.template import template
from carpool.errors import described
from carpool.fingerprint import LARGEST_DIGEST_BYTES
from carpool.kernels.recurrent import lent
from carpool.kernels.resident import step as steps
from carpool.kernels.resident.apart import is_apart
from carpool.kernels.resident.builder import Builder, Refused, Value
from carpool.kernels.resident.loops import Draw, Product, Statement, Type, reads, whole, writes
from carpool.kernels.resident.lower import TYPES, lowered, type_of
from carpool.kernels.table import single

Tensors = Mapping[str, Tensor]
OWN, SHARED, DATA, OUT = "leaf:", "shared:", "data:", "out:"
_COMMON = (
    0.25  # of all products: more that only what members share goes into is torch's, which computes it once
)


@dataclass(frozen=True)
class Told:
    """An output of a batch, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Forward:
    """The code of a forward pass on batches of one size, and what it leaves behind."""

    code: Code
    outputs: tuple[Told, ...]
    nest: pytree.TreeSpec
    is_apart: bool
    """Whether outputs have a row for each sample, made of that sample alone."""
    is_common: bool
    """Whether much of it is the same for all members: torch computes that once."""


def forward_of(
    model: nn.Module, names: Mapping[str, str], examples: Tensors, inputs: Inputs, size: int
) -> Forward:
    """The code for a batch like these inputs. `examples` are tensors of the shapes that one member sees.

    `names` are the leaves' own names by those in `examples`; the rest are the inputs' tensors, in order.

    Raises Refused, which names what is in the way.
    """
    try:
        return _Assembly(_Pass(model, names, examples, inputs), examples, size).forward()
    except Refused:
        raise
    except Exception as error:  # what cannot be traced by itself runs as it is
        raise Refused(described(error)) from error


class _Pass:
    """A forward pass as it was traced."""

    def __init__(self, model: nn.Module, names: Mapping[str, str], examples: Tensors, inputs: Inputs) -> None:
        bare = template(model)
        before = model_signature(bare)
        buffers = {name for name, _ in bare.named_buffers()}
        self._nest: pytree.TreeSpec | None = None

        def told(given: Tensors) -> list[Tensor]:
            leaves = {
                name: given[place].clone() if name in buffers else given[place]
                for place, name in names.items()
            }
            # Copies: a model that writes into its input writes into its own.
            data = [leaf.clone() for place, leaf in given.items() if place not in names]
            arguments, keywords = inputs.holding(data).arguments()
            with single(0, 0), WideNorms(), lent(bare):
                made = functional_call(bare, leaves, arguments, keywords)
            flat, self._nest = pytree.tree_flatten(made)
            if not all(isinstance(leaf, Tensor) for leaf in flat):
                raise Refused("outputs that are no tensors")
            return flat

        def step(*given: Tensor) -> list[Tensor]:
            named = dict(zip(examples, given, strict=True))
            # Row by row refuses random numbers that are not keyed, as in a stack of few.
            made = by_row(lambda _: told(named), (0,), apart=True)(torch.zeros(1))
            return [tensor[0] for tensor in made]

        graph = graph_without_memory(step, examples)
        if model_signature(bare) != before:
            raise Refused("a forward pass that changes its model")
        count = len(graph.output_node().args[0])  # type: ignore[arg-type]
        self.traced = Traced(graph, tuple(examples), tuple(f"{OUT}{number}" for number in range(count)))

    @property
    def nest(self) -> pytree.TreeSpec:
        assert self._nest is not None
        return self._nest


class _Assembly:
    """The loops of a pass, and where its arrays come from and go to."""

    def __init__(self, given: _Pass, examples: Tensors, size: int) -> None:
        self._pass, self._examples, self._size = given, examples, size
        self._real: Type = _real(examples)

    def forward(self) -> Forward:
        step, told = self._step(frozenset())
        if any(isinstance(statement, Draw) for statement in step.body):
            raise Refused("random numbers")
        data = {batch.array: self._size for batch in step.batches}
        apart = is_apart(step.body, data, [output.array for output in step.outputs])
        common = self._is_common(step)
        if turned := steps.turned(step):
            step, told = self._step(turned)
        held = {f"held:{name}": tensor.contiguous() for name, (_, tensor) in self._builder.held.items()}
        if any(tensor.nbytes > LARGEST_DIGEST_BYTES for tensor in held.values()):
            raise Refused("a large tensor that is neither a parameter nor a buffer")
        source, names, memory = steps.program(step)
        traced = self._pass.traced
        about = steps.flops(step), traced.operators, traced.lowest
        code = Code(source, tuple(names), memory, self._size, *about, held)
        return Forward(code, told, self._pass.nest, apart, common)

    def _step(self, turned: frozenset[str]) -> tuple[steps.Step, tuple[Told, ...]]:
        builder = self._builder = Builder()
        made = self._made = steps.Step(self._real, self._size, machine.vector_bytes(), trains=False)
        graph = self._pass.traced.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        given = {
            node.name: self._input(number, name, turned) if node.users else None
            for number, (node, name) in enumerate(zip(placeholders, self._examples, strict=True))
        }
        outputs = []
        sources = graph.output_node().args[0]
        for number, value in enumerate(lowered(graph, builder, given)):
            array = builder.array(value.type, value.shape, f"out{number}")
            builder.into(whole(array), value)
            made.outputs.append(steps.Output(array, f"{OUT}{number}"))
            dtype = sources[number].meta["val"].dtype  # type: ignore[index, union-attr]
            if TYPES.get(dtype) != value.type:
                raise Refused(f"an output of type {dtype}")
            outputs.append(Told(f"{OUT}{number}", value.shape, dtype))
        made.body = builder.statements
        for name, (array, _) in builder.held.items():
            made.homes.append(steps.Home(array, f"held:{name}", 0, is_stored=False))
        return made, tuple(outputs)

    def _input(self, number: int, name: str, turned: frozenset[str]) -> Value:
        builder, made, tensor = self._builder, self._made, self._examples[name]
        shape, type = tuple(tensor.shape), type_of(tensor)
        if name.startswith(DATA):
            array = builder.array(type, shape, f"data{number}")
            made.batches.append(steps.Batch(array, name, tensor[:1].nbytes))
            return builder.lying(array)
        is_turned = f"w{number}" in turned
        lies = (*shape[1:], shape[0]) if is_turned else shape
        array = builder.array(type, lies, f"w{number}", kept=True)
        made.homes.append(steps.Home(array, name, 0, is_stored=False, is_turned=is_turned))
        value = builder.lying(array)
        return builder.permuted(value, range(-1, len(shape) - 1)) if is_turned else value

    def _is_common(self, step: steps.Step) -> bool:
        own = {home.array for home in step.homes if home.tensor.startswith(OWN)}
        total, common = 0, 0
        for statement in step.body:
            if own.isdisjoint(reads(statement)):
                common += _flops(statement)
            else:
                own |= writes(statement)
            total += _flops(statement)
        return common > _COMMON * total


def _flops(statement: Statement) -> int:
    return 2 * prod(statement.space) * statement.depth if isinstance(statement, Product) else 0


def _real(examples: Tensors) -> Type:
    """The type of the weights, or of the samples where there are none."""
    leaves = [leaf for name, leaf in examples.items() if DATA not in name] or examples.values()
    found = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
    if len(found) > 1 or not found <= {torch.float32, torch.float64}:
        raise Refused(f"weights of types {', '.join(sorted(map(str, found)))}")
    return TYPES[found.pop() if found else torch.float32]
