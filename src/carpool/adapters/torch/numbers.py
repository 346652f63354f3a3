"""Numbers that a trace holds as tensors of the host, made constants of the graph before it is compiled for a GPU.

`loss / 2` leaves one under vmap. Beside the losses of many members it is a number to the compiler; beside the single one of a stack of one
it is a second tensor of one element, and the compiler hands a kernel of the GPU memory of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from carpool.adapters.torch.faking import faked

_HOST = torch.device("cpu")


def inline_numbers(module: GraphModule, inputs: Sequence[Tensor]) -> None:
    """Replaces those that are used with tensors of the GPU that the inputs are on. The inputs may be fake."""
    device, numbers = inputs[0].device, _numbers(module)
    if device.type != "cuda" or not numbers:
        return
    devices = _devices(module, inputs)
    for node, number in numbers.items():
        users = [user for user in node.users if devices.get(user) == device]
        if not users:
            continue
        with module.graph.inserting_before(node):
            options = {"dtype": number.dtype, "device": device}
            made = module.graph.call_function(torch.ops.aten.full.default, ([], number.item()), options)
        for user in users:
            user.replace_input_with(node, made)
    module.graph.eliminate_dead_code()
    module.recompile()


def _numbers(module: GraphModule) -> dict[Node, Tensor]:
    """The nodes that are one number, on the host, in every run."""
    found: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        value = _value(module, node, found)
        if value is not None and _is_of_host(value):
            found[node] = value
    return found


def _value(module: GraphModule, node: Node, found: Mapping[Node, Tensor]) -> Tensor | None:
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(module)
        return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else None
    if node.target is not torch.ops.aten._to_copy.default or node.kwargs.get("device", _HOST) != _HOST:
        return None
    copied = node.args[0]
    # A trace may have a number for a tensor of one.
    value = found.get(copied) if isinstance(copied, Node) else torch.tensor(copied)
    return None if value is None else value.to(node.kwargs.get("dtype") or value.dtype)  # type: ignore[arg-type]


def _is_of_host(value: Tensor) -> bool:
    return value.dim() == 0 and value.device == _HOST and not value.is_complex()


def _devices(module: GraphModule, inputs: Sequence[Tensor]) -> dict[Node, torch.device]:
    """Where each node's tensor lies; nothing is computed."""
    found: dict[Node, torch.device] = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: Node) -> object:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                found[n] = value.device
            return value

    with faked():
        blank = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
        Watch(module).run(*blank)
    return found
