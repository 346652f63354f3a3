"""Members' convolutions one by one, against torch's own rule, which makes one grouped convolution of them."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from carpool.kernels import convolve

CASES = {
    "conv1d": (F.conv1d, 1, (4, 6, 9), (8, 3, 3), {"stride": 2, "padding": 1, "groups": 2}),
    "conv2d": (F.conv2d, 2, (4, 6, 9, 7), (8, 6, 3, 3), {"padding": (1, 0), "dilation": 2}),
    "conv3d": (F.conv3d, 3, (2, 2, 5, 5, 5), (3, 2, 3, 3, 3), {"padding": 1}),
}
TRANSPOSED = {
    "conv_transpose1d": (F.conv_transpose1d, 1, (4, 6, 5), (6, 3, 3), {"stride": 2, "output_padding": 1}),
    "conv_transpose2d": (F.conv_transpose2d, 2, (4, 6, 5, 4), (6, 2, 3, 3), {"groups": 2, "stride": (2, 1)}),
    "conv_transpose3d": (F.conv_transpose3d, 3, (2, 2, 3, 3, 3), (2, 3, 2, 2, 2), {"dilation": 2}),
}


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("shared", [False, True], ids=["own batches", "one batch"])
@pytest.mark.parametrize("name", [*CASES, *TRANSPOSED])
def test_values_and_gradients_equal_torchs(monkeypatch, name, shared, narrow):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    members = 3
    torchs, dims, input_sizes, weight_sizes, options = {**CASES, **TRANSPOSED}[name]
    ours = (convolve.convolution if name in CASES else convolve.transposed)(dims)
    torch.manual_seed(0)
    groups = options.get("groups", 1)
    channels = weight_sizes[0] if name in CASES else weight_sizes[1] * groups
    x = torch.randn(*(() if shared else (members,)), *input_sizes, dtype=torch.float64)
    w = torch.randn(members, *weight_sizes, dtype=torch.float64)
    b = torch.randn(members, channels, dtype=torch.float64)

    def objective(function):
        def value(w, b, x):
            with convolve.narrow(narrow):
                made = function(x, w, b, **options)
            assert made is not NotImplemented
            return made.sin().sum()

        return vmap(grad(value, argnums=(0, 1, 2)), in_dims=(0, 0, None if shared else 0))(w, b, x)

    for got, expected in zip(objective(ours), objective(torchs), strict=True):
        torch.testing.assert_close(got, expected)


def test_without_a_bias_and_without_the_inputs_gradient(monkeypatch):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    x, w = torch.randn(2, 3, 1, 8, dtype=torch.float64), torch.randn(2, 4, 1, 3, dtype=torch.float64)

    def gradient(function):
        with convolve.narrow(True):
            return vmap(grad(lambda w, x: function(x, w).square().sum()))(w, x)

    torch.testing.assert_close(gradient(convolve.convolution(1)), gradient(F.conv1d))


def test_what_only_torch_reads_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    x, w = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3)
    assert convolve.convolution(2)(x, w, padding="same") is NotImplemented
    assert convolve.convolution(2)(x[0], w) is NotImplemented


def test_a_cpu_keeps_torchs_rule():
    assert convolve.convolution(2)(torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3)) is NotImplemented


@pytest.mark.parametrize("narrow", [True, False])
def test_only_a_narrow_stack_runs_its_members_one_by_one(monkeypatch, narrow):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    x, w = torch.randn(3, 2, 1, 8), torch.randn(3, 4, 1, 3)

    def convolved(x, w):
        with convolve.narrow(narrow):
            return convolve.convolution(1)(x, w)

    traced = make_fx(vmap(convolved))(x, w)
    calls = [node for node in traced.graph.nodes if node.target is torch.ops.aten.convolution.default]
    assert len(calls) == (3 if narrow else 1)
