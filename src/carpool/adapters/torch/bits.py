"""The least precise floating type that a traced step computes in: what it is compared by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from carpool import fidelity

_MOVES = frozenset(
    {"alias", "cat", "clone", "copy_", "embedding", "gather", "index", "index_select", "stack", "where"}
)
"""Operations that round nothing. Views say so themselves."""


def lowest(graph: Graph, names: Iterable[str]) -> torch.dtype:
    """The least precise type in which numbers are rounded on their way into the tensors of a step, or when they are written there.

    What ends in a comparison is left out: a dropout mask is drawn in single precision everywhere, and is the same to the bit. So is the
    count of an optimizer, which torch keeps in single precision for weights of any type: `names` are those of the step's tensors.
    """
    return lowest_behind(_writes(graph, names))


def lowest_behind(nodes: Iterable[Node]) -> torch.dtype:
    """The same on the way to what these nodes make."""
    made = list(nodes)
    found = {kind for node in made if (kind := _type(node))}
    found |= {_type(node) for node in _behind(made) if _rounds(node)}
    return getattr(torch, fidelity.lowest(found))


def _writes(graph: Graph, names: Iterable[str]) -> Iterator[Node]:
    """Nodes that write into the step's own tensors."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    kept = {node for node, name in zip(given, names, strict=True) if not name.startswith("tally:")}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and node.args and node.args[0] in kept:
            yield node


def _behind(nodes: Iterable[Node]) -> set[Node]:
    """All nodes of floating types that reach these by way of such nodes."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and _type(node):
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _rounds(node: Node) -> bool:
    """Whether it computes with floating numbers, or casts them to a less precise type."""
    read = [_type(one) for one in node.all_input_nodes if _type(one)]
    if node.op != "call_function" or not read or getattr(node.target, "is_view", False):
        return False
    name = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
    if name == "_to_copy":
        return fidelity.lowest([*read, _type(node)]) != fidelity.lowest(read)
    return name not in _MOVES


def _type(node: Node) -> str:
    """The name of the floating type of what a node makes; "" for anything else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return ""
    return _named(value.dtype)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
