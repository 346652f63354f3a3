"""Numbers of the host in a trace: constants of the graph where it is compiled for a GPU, and left alone elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from carpool.adapters.torch.numbers import inline_numbers

HALF = torch.tensor(0.5, dtype=torch.float64)


def traced(step: Callable[[Tensor], Tensor], device: str) -> tuple[GraphModule, list[Tensor]]:
    """The step as it is traced over one fake input there; no such device is needed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(1, 3, device=device)]
    return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs), inputs


def held(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]


def made(module: GraphModule) -> list[tuple[object, ...]]:
    return [
        (node.args[1], node.kwargs["dtype"], node.kwargs["device"])
        for node in module.graph.nodes
        if node.target is torch.ops.aten.full.default
    ]


def test_a_number_beside_tensors_of_a_gpu_becomes_its_constant():
    module, inputs = traced(lambda x: x / HALF, "cuda:0")
    assert held(module)
    inline_numbers(module, inputs)
    assert not held(module)
    assert made(module) == [(0.5, torch.float64, torch.device("cuda", 0))]
    module.graph.lint()


@pytest.mark.parametrize("written_out", [False, True])
def test_a_copy_of_a_number_becomes_one_too(written_out: bool):
    module, inputs = traced(lambda x: x / torch.ops.aten._to_copy(HALF, dtype=torch.float32), "cuda:0")
    copied = next(node for node in module.graph.nodes if node.target is torch.ops.aten._to_copy.default)
    if written_out:  # as some versions of torch trace it
        copied.args = (0.5,)
        module.recompile()
    inline_numbers(module, inputs)
    assert not held(module)
    assert made(module) == [(0.5, torch.float32, torch.device("cuda", 0))]


@pytest.mark.parametrize(
    ("step", "device"),
    [
        pytest.param(lambda x: x / HALF, "cpu", id="on a CPU"),
        pytest.param(lambda x: x + (HALF * torch.arange(3)).to(x.device), "cuda:0", id="the host's own"),
        pytest.param(lambda x: x + torch.tensor([1.0, 2.0, 3.0]).to(x.device), "cuda:0", id="a list"),
    ],
)
def test_what_the_host_computes_with_stays_there(step: Callable[[Tensor], Tensor], device: str):
    module, inputs = traced(step, device)
    before = str(module.graph)
    inline_numbers(module, inputs)
    assert str(module.graph) == before
