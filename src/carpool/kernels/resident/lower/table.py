"""Which operators of a traced step have loops, and how a graph of them is lowered, one node after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from carpool.kernels.resident.builder import Builder, Refused, Value
from carpool.kernels.resident.loops import Type

Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}
"""By the operator's name. Each is called with a `Call`, then with what the operator is called with."""

TYPES: dict[torch.dtype, Type] = {
    torch.float32: "f4",
    torch.float64: "f8",
    torch.int64: "i8",
    torch.int32: "i4",
    torch.bool: "u1",
}


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Enters a lowering under these operators' names."""

    def enter(lowering: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(names, lowering))
        return lowering

    return enter


class Call:
    """One operator's call: the builder, and what the trace says that it gives."""

    def __init__(self, builder: Builder, node: Node) -> None:
        self.builder, self.node = builder, node

    @property
    def made(self) -> Any:
        return self.node.meta["val"]

    @property
    def type(self) -> Type:
        return type_of(self.made)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.made.shape)


def type_of(tensor: Tensor) -> Type:
    if tensor.dtype not in TYPES:
        raise Refused(f"numbers of type {tensor.dtype}")
    return TYPES[tensor.dtype]


def lowered(graph: Graph, builder: Builder, inputs: Mapping[str, Value | None]) -> Any:
    """Runs a graph's operators through the table; what its output is made of. `inputs` are by placeholder."""
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[node.name]
        elif node.op == "output":
            return torch.fx.map_arg(node.args[0], values.__getitem__)
        elif node.op == "get_attr":
            values[node] = _attribute(builder, graph, node)
        else:
            values[node] = _called(builder, node, values)
            if _is_in_place(node):
                values[_changed(node)] = values[node]
    raise AssertionError("a graph has an output")


def _is_in_place(node: Node) -> bool:
    """Whether an operator changes its first argument: who comes later reads what it is then."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _changed(node: Node) -> Node:
    """What an operator changes. Nothing else may be a view of it, and it must be the step's own."""
    changed = node.args[0]
    assert isinstance(changed, Node)
    if changed.op == "placeholder" or any(map(_is_view, (changed, *changed.users))):
        raise Refused(f"{name_of(node)} on a view")
    return changed


def _is_view(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or _is_in_place(node):
        return False
    return any(one.alias_info is not None for one in node.target._schema.returns)


def _called(builder: Builder, node: Node, values: Mapping[Node, Any]) -> Any:
    name = name_of(node)
    if name == "_operator.getitem":
        return values[node.args[0]][node.args[1]]  # type: ignore[index]
    if _is_in_place(node):
        name = name.replace("_.", ".", 1)
    lowering = LOWERINGS.get(name)
    if lowering is None:
        raise Refused(f"{name} has no loops")
    args: Any = torch.fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = torch.fx.map_arg(node.kwargs, values.__getitem__)
    try:
        made = lowering(Call(builder, node), *args, **kwargs)
    except Refused as refused:
        raise Refused(f"{name}: {refused}" if name not in str(refused) else str(refused)) from refused
    if isinstance(made, Value):
        if made.shape != tuple(node.meta["val"].shape):
            raise Refused(f"{name} gives {made.shape} for {tuple(node.meta['val'].shape)}")
        builder.shared(made, len(node.users))
    return made


def name_of(node: Node) -> str:
    """`aten.add.Tensor`, say."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _attribute(builder: Builder, graph: Graph, node: Node) -> Value:
    """A tensor that the trace holds: a number is a constant of the loops, a longer one is read in place."""
    held: Any = graph.owning_module
    for part in str(node.target).split("."):
        held = getattr(held, part)
    if not isinstance(held, Tensor):
        raise Refused(f"the step holds a {held.__class__.__name__}")
    if held.numel() == 1:
        return builder.constant(held.shape, held.item(), type_of(held))
    name = "".join(c if c.isalnum() else "_" for c in f"held{node.target}")
    array, _ = builder.held.setdefault(
        name, (builder.array(type_of(held), held.shape, name, kept=True), held)
    )
    return builder.lying(array)
