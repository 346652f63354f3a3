"""Members' convolutions one by one, against torch's own rule, which makes one grouped convolution of them."""

from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from carpool.kernels import convolve
from carpool.kernels.convolve import Form

CASES = {
    "conv1d": (F.conv1d, 1, (4, 6, 9), (8, 3, 3), {"stride": 2, "padding": 1, "groups": 2}),
    "conv2d": (F.conv2d, 2, (4, 6, 9, 7), (8, 6, 3, 3), {"padding": (1, 0), "dilation": 2}),
    "conv3d": (F.conv3d, 3, (2, 2, 5, 5, 5), (3, 2, 3, 3, 3), {"padding": 1}),
    "same": (F.conv2d, 2, (4, 6, 9, 7), (8, 6, 3, 5), {"padding": "same", "dilation": (2, 1)}),
    "valid": (F.conv1d, 1, (4, 6, 9), (8, 6, 3), {"padding": "valid"}),
}
TRANSPOSED = {
    "conv_transpose1d": (F.conv_transpose1d, 1, (4, 6, 5), (6, 3, 3), {"stride": 2, "output_padding": 1}),
    "conv_transpose2d": (F.conv_transpose2d, 2, (4, 6, 5, 4), (6, 2, 3, 3), {"groups": 2, "stride": (2, 1)}),
    "conv_transpose3d": (F.conv_transpose3d, 3, (2, 2, 3, 3, 3), (2, 3, 2, 2, 2), {"dilation": 2}),
}


CPU = torch.device("cpu")
STACKED = [Form.TOGETHER, Form.APART]


@pytest.mark.parametrize("form", [*STACKED, Form.INNERMOST])
@pytest.mark.parametrize("shared", [False, True], ids=["own batches", "one batch"])
@pytest.mark.parametrize("name", [*CASES, *TRANSPOSED])
def test_values_and_gradients_equal_torchs(monkeypatch, name, shared, form):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    monkeypatch.setattr(convolve, "_by_tensor_cores", lambda *_: True)
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
            with convolve.formed(form):
                made = function(x, w, b, **options)
            if made is NotImplemented:
                assert form is Form.INNERMOST, "in groups, or of other dimensions: torch's own"
                made = torchs(x, w, b, **options)
            return made.sin().sum()

        gradient = grad(value, argnums=(0, 1, 2))
        if form is not Form.INNERMOST:
            return vmap(gradient, in_dims=(0, 0, None if shared else 0))(w, b, x)
        return gradient(w[0], b[0], x if shared else x[0])

    for got, expected in zip(objective(ours), objective(torchs), strict=True):
        torch.testing.assert_close(got, expected)


def test_without_a_bias_and_without_the_inputs_gradient(monkeypatch):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    x, w = torch.randn(2, 3, 1, 8, dtype=torch.float64), torch.randn(2, 4, 1, 3, dtype=torch.float64)

    def gradient(function):
        with convolve.formed(Form.APART):
            return vmap(grad(lambda w, x: function(x, w).square().sum()))(w, x)

    torch.testing.assert_close(gradient(convolve.convolution(1)), gradient(F.conv1d))


def test_what_only_torch_reads_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    x, w = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3)
    assert convolve.convolution(2)(x, w[..., :2], padding="same") is NotImplemented, "more on one side"
    assert convolve.convolution(2)(x[0], w) is NotImplemented


def test_autocast_leaves_float64_alone(monkeypatch):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    x, w = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert convolve.convolution(2)(x, w).dtype == torch.bfloat16
        assert convolve.convolution(2)(x.double(), w.double()).dtype == torch.float64


def test_a_cpu_keeps_torchs_rule():
    assert convolve.convolution(2)(torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3)) is NotImplemented


@pytest.mark.parametrize("form", STACKED)
def test_only_a_narrow_stack_runs_its_members_one_by_one(monkeypatch, form):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    x, w = torch.randn(3, 2, 1, 8), torch.randn(3, 4, 1, 3)

    def convolved(x, w):
        with convolve.formed(form):
            return convolve.convolution(1)(x, w)

    traced = make_fx(vmap(convolved))(x, w)
    calls = [node for node in traced.graph.nodes if node.target is torch.ops.aten.convolution.default]
    assert len(calls) == (3 if form is Form.APART else 1)


@pytest.mark.parametrize(
    ("form", "cores", "innermost"),
    [(Form.INNERMOST, True, True), (Form.INNERMOST, False, False), (Form.PLAIN, True, False)],
)
def test_forward_and_backward_read_channels_innermost_where_tensor_cores_do(
    monkeypatch, form, cores, innermost
):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    monkeypatch.setattr(convolve, "_by_tensor_cores", lambda *_: cores)
    x, w = torch.randn(2, 4, 5, 5), torch.randn(6, 4, 3, 3)

    def value(w, x):
        with convolve.formed(form):
            made = convolve.convolution(2)(x, w)
            return (F.conv2d(x, w) if made is NotImplemented else made).sin().sum()

    traced = make_fx(grad(value, argnums=(0, 1)), tracing_mode="fake")(w, x)
    ran = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
    nodes = [node for node in traced.graph.nodes if node.target in ran]
    assert [node.target for node in nodes] == list(ran)
    read = [arg.meta["val"] for node in nodes for arg in node.args[:3] if isinstance(arg, torch.fx.Node)]
    assert len(read) == 5
    assert all((tensor.stride(1) == 1) is innermost for tensor in read)


def test_each_tensor_is_turned_around_once(monkeypatch):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    monkeypatch.setattr(convolve, "_by_tensor_cores", lambda *_: True)
    x, w = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3)

    def value(w, x):
        with convolve.formed(Form.INNERMOST):
            for _ in range(3):
                x = convolve.convolution(2)(x, w, padding=1).relu()
            return x.sin().sum()

    traced = make_fx(grad(value), tracing_mode="fake")(w, x)
    turned = [node for node in traced.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert [node.meta["val"].shape for node in turned] == [x.shape, w.shape, w.shape, w.shape]


@pytest.mark.parametrize(("groups", "innermost"), [(1, True), (2, False), (4, True)])
def test_groups_of_several_channels_stay_as_they_are(monkeypatch, groups, innermost):
    monkeypatch.setattr(convolve, "_by_tensor_cores", lambda *_: True)
    assert convolve._reads_innermost(torch.randn(8, 4 // groups, 3, 3), groups) is innermost
    assert not convolve._reads_innermost(torch.randn(8, 4 // groups, 3), groups)


def test_older_gpus_have_none_for_single_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not convolve._by_tensor_cores(torch.float32, torch.device("cuda"))
    assert not convolve._by_tensor_cores(torch.bfloat16, torch.device("cuda"))
    assert convolve._by_tensor_cores(torch.float16, torch.device("cuda"))


def test_tensor_cores_compute_in_sixteen_bits_and_in_tf32():
    assert convolve._by_tensor_cores(torch.bfloat16, CPU)
    assert not convolve._by_tensor_cores(torch.float64, CPU)
    place = attrgetter("cudnn.conv")(torch.backends)
    before = place.fp32_precision
    try:
        for word in ("tf32", "ieee"):
            place.fp32_precision = word
            assert convolve._by_tensor_cores(torch.float32, CPU) is (word == "tf32")
    finally:
        place.fp32_precision = before


@pytest.mark.parametrize(
    ("members", "weights", "expected"),
    [
        (1, [(128, 64, 3, 3)], Form.INNERMOST),
        (4, [(128, 64, 3, 3)], Form.APART),
        (5, [(128, 64, 3, 3)], Form.TOGETHER),
        (1, [(64, 64, 3, 3), (10, 4096), (10,)], Form.PLAIN),
        (1, [(16, 80, 3)], Form.PLAIN),
        (1, [], Form.PLAIN),
    ],
)
def test_the_form_is_a_rule_of_width_and_shapes(members, weights, expected):
    assert convolve.form(members, weights) == expected
    assert convolve.form(members, weights, turns=False) is not Form.INNERMOST
