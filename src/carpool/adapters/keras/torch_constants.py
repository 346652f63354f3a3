"""What of a traced step is the same at every step is computed once: numbers written in the step, and what is made of them alone.

On a GPU this is more than speed: a number that has to come from the host cannot be part of a captured step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

_MOST_ELEMENTS = 4096  # more than that is made anew at each step: what a remembered step holds stays


def fold(traced: GraphModule) -> None:
    """Replaces operations on constants by their results, in place."""
    known: dict[Node, torch.Tensor] = {}
    for node in list(traced.graph.nodes):
        if node.op == "get_attr":
            value = getattr(traced, str(node.target), None)
            if isinstance(value, torch.Tensor):
                known[node] = value
        elif _is_pure(node) and all(one in known for one in node.all_input_nodes):
            made = _computed(node, known)
            if isinstance(made, torch.Tensor) and made.numel() <= _MOST_ELEMENTS:
                known[node] = made
    for node, value in known.items():
        if node.op == "get_attr" or not any(user not in known for user in node.users):
            continue
        name = f"_folded_{node.name}"
        traced.register_buffer(name, value, persistent=False)
        with traced.graph.inserting_before(node):
            node.replace_all_uses_with(traced.graph.get_attr(name))
    traced.graph.eliminate_dead_code()


def host_reads(traced: GraphModule) -> str | None:
    """What of the step needs the host, or a generator of torch's: none of it could be replayed."""
    for node in traced.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target is torch.ops.aten._local_scalar_dense.default:
            return "it reads a tensor's value on the host at every step"
        name = str(node.target)
        if torch.Tag.nondeterministic_seeded in node.target.tags and "dot_product" not in name:
            return f"{name} draws random numbers that are not keyed by job"
    return None


def holds(traced: GraphModule, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the step holds one of these, which are not among its inputs; to be asked before `fold`."""
    places = {tensor.data_ptr() for tensor in tensors}
    held = [getattr(traced, str(node.target), None) for node in traced.graph.nodes if node.op == "get_attr"]
    return any(isinstance(one, torch.Tensor) and one.data_ptr() in places for one in held)


def _is_pure(node: Node) -> bool:
    """Whether it computes without writing, and what it answers is written by nobody."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return not any(_writes(user) for user in _seen_through(node))


def _seen_through(node: Node) -> list[Node]:
    """Its users, and those of its views."""
    found: list[Node] = []
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if user in found:
            continue
        found.append(user)
        if isinstance(user.target, torch._ops.OpOverload) and user.target.is_view:
            todo += list(user.users)
    return found


def _writes(user: Node) -> bool:
    return isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable


def _computed(node: Node, known: dict[Node, torch.Tensor]) -> Any:
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda one: known[one])
    with torch.no_grad():
        made = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
    return made.clone() if isinstance(made, torch.Tensor) else made
