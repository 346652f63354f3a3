"""Convolutions with channels innermost, against torch's own."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

from carpool.kernels import convolve

CASES = {
    "plain": (F.conv2d, (4, 6, 9, 7), (8, 6, 3, 3), {"padding": (1, 0), "dilation": 2}),
    "same": (F.conv2d, (4, 6, 9, 7), (8, 6, 3, 5), {"padding": "same"}),
    "depthwise": (F.conv2d, (4, 6, 9, 7), (12, 1, 3, 3), {"groups": 6, "stride": 2}),
    "grouped": (F.conv2d, (4, 6, 9, 7), (8, 3, 3, 3), {"groups": 2}),
    "transposed": (
        F.conv_transpose2d,
        (4, 6, 5, 4),
        (6, 8, 3, 3),
        {"stride": (2, 1), "output_padding": (1, 0)},
    ),
}


BY_TENSOR_CORES = convolve._by_tensor_cores


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with tensor cores."""
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    monkeypatch.setattr(convolve, "_by_tensor_cores", lambda *_: True)


def ours(torchs, *args, **options):
    with convolve.innermost(True):
        made = convolve.laid_out(torchs)(*args, **options)
    return torchs(*args, **options) if made is NotImplemented else made


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_torchs(case):
    torchs, input_sizes, weight_sizes, options = CASES[case]
    torch.manual_seed(0)
    x, w = (torch.randn(sizes, dtype=torch.float64) for sizes in (input_sizes, weight_sizes))
    channels = weight_sizes[1] if case == "transposed" else weight_sizes[0]
    b = torch.randn(channels, dtype=torch.float64)

    def gradients(function):
        return grad(lambda x, w, b: function(x, w, b, **options).sin().sum(), argnums=(0, 1, 2))(x, w, b)

    wanted = gradients(torchs)
    for got, expected in zip(gradients(lambda *a, **o: ours(torchs, *a, **o)), wanted, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_penalty_on_gradients_has_a_gradient():
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)

    def penalty(function):
        return grad(lambda w: grad(lambda x: function(x, w).sin().sum())(x).square().sum())(w)

    torch.testing.assert_close(penalty(lambda x, w: ours(F.conv2d, x, w)), penalty(F.conv2d))


def read(wanted: bool, value) -> list[Tensor]:
    """What the convolutions of a step and of its gradient read."""
    x, w = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3)

    def step(w, x):
        with convolve.innermost(wanted):
            return value(x, w)

    traced = make_fx(grad(step, argnums=(0, 1)), tracing_mode="fake")(w, x)
    ran = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
    nodes = [node for node in traced.graph.nodes if node.target in ran]
    assert {node.target for node in nodes} == set(ran)
    return [arg.meta["val"] for node in nodes for arg in node.args[:3] if isinstance(arg, torch.fx.Node)]


def convolved(x, w, **options):
    made = convolve.laid_out(F.conv2d)(x, w, **options)
    return F.conv2d(x, w, **options) if made is NotImplemented else made


@pytest.mark.parametrize("wanted", [True, False])
def test_forward_and_backward_read_channels_innermost_where_that_is_wanted(wanted):
    found = read(wanted, lambda x, w: convolved(x, w).sin().sum())
    assert len(found) == 5
    assert all((tensor.stride(1) == 1) is wanted for tensor in found)


@pytest.mark.parametrize("end", [torch.sum, lambda x: x.flatten(1).sum(), lambda x: x.mean((2, 3)).sum()])
def test_gradients_are_turned_around_where_they_reach_the_last_one(end):
    found = read(True, lambda x, w: end(convolved(convolved(x, w).relu(), w)))
    assert all(tensor.stride(1) == 1 for tensor in found)


def test_each_tensor_is_turned_around_once():
    x, w = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3)

    def value(w, x):
        with convolve.innermost(True):
            for _ in range(3):
                x = convolved(x, w, padding=1).relu()
            return x.sin().sum()

    traced = make_fx(grad(value), tracing_mode="fake")(w, x)
    turned = [node for node in traced.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert [node.meta["val"].shape for node in turned] == [x.shape, w.shape, w.shape, w.shape]


@pytest.mark.parametrize(
    ("input", "weight", "options"),
    [
        ((2, 4, 5, 5), (8, 2, 3, 3), {"groups": 2}),
        ((4, 5, 5), (8, 4, 3, 3), {}),
    ],
    ids=["groups of several channels", "no batch"],
)
def test_the_rest_is_left_to_torch(input, weight, options):
    with convolve.innermost(True):
        assert (
            convolve.laid_out(F.conv2d)(torch.randn(input), torch.randn(weight), **options) is NotImplemented
        )


def test_groups_are_found_where_they_are_passed():
    x, w = torch.randn(2, 4, 5, 5), torch.randn(8, 2, 3, 3)
    with convolve.innermost(True):
        assert convolve.laid_out(F.conv2d)(x, w, None, 1, 0, 1, 2) is NotImplemented
        assert convolve.laid_out(F.conv_transpose2d)(x, w[:4], None, 1, 0, 0, 2) is NotImplemented


def test_elsewhere_nothing_is_turned_around(monkeypatch):
    x, w = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3)
    assert convolve.laid_out(F.conv2d)(x, w) is NotImplemented
    monkeypatch.setattr(convolve, "_KIND", "cuda")
    with convolve.innermost(True):
        assert convolve.laid_out(F.conv2d)(x, w) is NotImplemented


def test_older_gpus_have_tensor_cores_for_fewer_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    gpu = torch.device("cuda")
    found = [BY_TENSOR_CORES(t, gpu) for t in (torch.float32, torch.bfloat16, torch.float16)]
    assert found == [False, False, True]


def test_tensor_cores_multiply_sixteen_bits_and_tf32():
    cpu = torch.device("cpu")
    assert BY_TENSOR_CORES(torch.bfloat16, cpu)
    assert not BY_TENSOR_CORES(torch.float64, cpu)
    place = attrgetter("cudnn.conv")(torch.backends)
    before = place.fp32_precision
    try:
        for word in ("tf32", "ieee"):
            place.fp32_precision = word
            assert BY_TENSOR_CORES(torch.float32, cpu) is (word == "tf32")
    finally:
        place.fp32_precision = before


def test_what_autocast_makes_of_it_counts(monkeypatch):
    monkeypatch.setattr(convolve, "_by_tensor_cores", BY_TENSOR_CORES)
    x, w = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)
    place = attrgetter("cudnn.conv")(torch.backends)
    before, place.fp32_precision = place.fp32_precision, "ieee"
    try:
        with convolve.innermost(True), torch.autocast("cpu", torch.bfloat16):
            made = convolve.laid_out(F.conv2d)(x, w)
            assert made.dtype == torch.bfloat16
            assert convolve.laid_out(F.conv2d)(x.double(), w.double()) is NotImplemented
        with convolve.innermost(True):
            assert convolve.laid_out(F.conv2d)(x, w) is NotImplemented
    finally:
        place.fp32_precision = before
