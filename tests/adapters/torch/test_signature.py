"""Attempts to fool the signature of torch models and losses; beside each difference, the equal twin."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from carpool.adapters.torch.signature import callable_signature, model_signature
from carpool.planning.cursor import Course
from carpool.planning.spec import ModelSpec, Signature, difference

torch.set_num_threads(1)

Change = Callable[["Net"], Any]


class Net(nn.Module):
    def __init__(self, width: int = 4, rate: float = 0.1) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(rate)
        self.fc2 = nn.Linear(width, 3)
        self.register_buffer("scale", torch.ones(1))
        self.steps = 3
        self.activation: Any = F.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.drop(self.activation(self.norm(self.fc1(x)))))

    def own_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.steps += 1

    def other_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x))


def changed(change: Change) -> Net:
    net = Net()
    change(net)
    return net


def hook(by: float) -> Callable[..., Any]:
    return lambda module, inputs, output: output * by


def pre_hook(by: float) -> Callable[..., Any]:
    return lambda module, inputs: tuple(x * by for x in inputs)


def grad_hook(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda grad: grad * by


def weight(net: Net) -> Any:
    return net.fc1.weight


def with_parameters(*names: str) -> nn.Module:
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.ones(1)))
    return module


CHANGES: dict[str, Change] = {
    "nothing": lambda net: None,
    "attribute": lambda net: setattr(net, "steps", 4),
    "attribute type": lambda net: setattr(net, "steps", 3.0),
    "new attribute": lambda net: setattr(net, "extra", None),
    "attribute in a dict": lambda net: setattr(net, "extra", {"a": [1]}),
    "other attribute in a dict": lambda net: setattr(net, "extra", {"a": [2]}),
    "dropout rate": lambda net: setattr(net.drop, "p", 0.2),
    "eval mode": lambda net: net.eval(),
    "eval mode of one layer": lambda net: net.norm.eval(),
    "frozen layer": lambda net: net.fc1.requires_grad_(False),
    "frozen bias": lambda net: net.fc1.bias.requires_grad_(False),
    "activation": lambda net: setattr(net, "activation", F.gelu),
    "activation built in": lambda net: setattr(net, "activation", torch.tanh),
    "activation partial": lambda net: setattr(net, "activation", functools.partial(F.leaky_relu)),
    "activation partial 0.2": lambda net: setattr(
        net, "activation", functools.partial(F.leaky_relu, negative_slope=0.2)
    ),
    "activation module": lambda net: setattr(net.drop, "inner", [nn.LeakyReLU(0.1)]),
    "other activation module": lambda net: setattr(net.drop, "inner", [nn.LeakyReLU(0.2)]),
    "activation lambda": lambda net: setattr(net, "activation", lambda x: x * 2),
    "other activation lambda": lambda net: setattr(net, "activation", lambda x: x * 3),
    "forward hook": lambda net: net.fc1.register_forward_hook(hook(2)),
    "forward hook of another constant": lambda net: net.fc1.register_forward_hook(hook(3)),
    "forward hook always": lambda net: net.fc1.register_forward_hook(hook(2), always_call=True),
    "forward hook with keywords": lambda net: net.fc1.register_forward_hook(hook(2), with_kwargs=True),
    "forward hook elsewhere": lambda net: net.fc2.register_forward_hook(hook(2)),
    "two forward hooks": lambda net: [net.fc1.register_forward_hook(hook(by)) for by in (2, 3)],
    "two forward hooks turned": lambda net: [net.fc1.register_forward_hook(hook(by)) for by in (3, 2)],
    "forward pre-hook": lambda net: net.fc1.register_forward_pre_hook(pre_hook(2)),
    "forward pre-hook of another constant": lambda net: net.fc1.register_forward_pre_hook(pre_hook(3)),
    "backward hook": lambda net: net.fc1.register_full_backward_hook(hook(2)),
    "hook on a gradient": lambda net: weight(net).register_hook(grad_hook(2)),
    "hook on a gradient of another constant": lambda net: weight(net).register_hook(grad_hook(3)),
    "hook after a gradient": lambda net: weight(net).register_post_accumulate_grad_hook(lambda p: None),
    "attribute of a parameter": lambda net: setattr(weight(net), "no_decay", True),
    "method of another name": lambda net: setattr(net, "forward", net.other_forward),
    "own method hooked": lambda net: net.fc1.register_forward_hook(net.own_hook),
    "patched forward": lambda net: setattr(net, "forward", types.MethodType(lambda self, x: x * 2, net)),
    "other patched forward": lambda net: setattr(
        net, "forward", types.MethodType(lambda self, x: x * 3, net)
    ),
    "tied": lambda net: setattr(net, "fc2", net.fc1),
    "tied bias": lambda net: setattr(net.norm, "bias", net.fc1.bias),
    "bias over one memory": lambda net: setattr(net.norm, "bias", nn.Parameter(net.fc1.bias.data)),
    "no bias": lambda net: setattr(net.fc1, "bias", None),
    "double": lambda net: net.double(),
    "half a layer": lambda net: net.fc2.bfloat16(),
    "attribute tensor": lambda net: setattr(net, "table", torch.arange(3)),
    "attribute tensor of other content": lambda net: setattr(net, "table", torch.arange(1, 4)),
    "attribute tensor of other type": lambda net: setattr(net, "table", torch.arange(3.0)),
    "attribute tensor bfloat16": lambda net: setattr(net, "table", torch.ones(3, dtype=torch.bfloat16)),
    "attribute tensor complex": lambda net: setattr(net, "table", torch.ones(3, dtype=torch.complex64)),
    "attribute tensor empty": lambda net: setattr(net, "table", torch.ones(0)),
    "attribute tensor without dimensions": lambda net: setattr(net, "table", torch.tensor(3)),
    "attribute dtype": lambda net: setattr(net, "table", torch.float16),
    "attribute size": lambda net: setattr(net, "table", torch.Size([3])),
    "attribute device": lambda net: setattr(net, "table", torch.device("cpu")),
    "own tensor in a list": lambda net: setattr(net, "table", [net.fc1.weight]),
    "other own tensor in a list": lambda net: setattr(net, "table", [net.fc2.weight]),
    "own module in a list": lambda net: setattr(net, "table", [net.fc1]),
    "parent in a child": lambda net: setattr(net.drop, "parent", (net,)),
    "buffer shape": lambda net: net.register_buffer("scale", torch.ones(2)),
    "buffer not persistent": lambda net: net.register_buffer("scale", torch.ones(1), persistent=False),
    "no buffer": lambda net: net.register_buffer("scale", None),
    "weight norm": lambda net: weight_norm(net.fc1),
    "weight norm of another axis": lambda net: weight_norm(net.fc1, dim=1),
    "spectral norm": lambda net: spectral_norm(net.fc1),
    "orthogonal": lambda net: orthogonal(net.fc1),
    "child more": lambda net: net.add_module("more", nn.ReLU()),
    "no child": lambda net: net.add_module("drop", None),
}


def spec(signature: Signature, name: str) -> ModelSpec:
    return ModelSpec(name, "torch", signature, Course(1, 1, 1), 0, 0)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_made_twice_is_equal_although_the_weights_differ(change: Change) -> None:
    first, second = (model_signature(changed(change)) for _ in range(2))
    assert first == second
    assert {first: "found"}[second] == "found"
    assert len(dict(first)) == len(first)


def test_every_change_is_seen_and_can_be_told() -> None:
    signatures = {name: model_signature(changed(change)) for name, change in CHANGES.items()}
    names = list(signatures)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert signatures[a] != signatures[b], (a, b)
            assert difference(spec(signatures[a], a), spec(signatures[b], b)) is not None, (a, b)


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    lambda: nn.GRUCell(2, 3),
    lambda: nn.MultiheadAttention(8, 2),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"),
    lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.GroupNorm(1, 2)),
    lambda: nn.Embedding(3, 4, padding_idx=0),
    lambda: nn.ParameterList([torch.ones(1), torch.ones(2)]),
    lambda: nn.ParameterDict({"a": torch.ones(1)}),
    lambda: nn.ModuleDict({"a": nn.ReLU(), "b": nn.PReLU()}),
    lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
]


@pytest.mark.parametrize("make", LAYERS)
def test_layers_of_torch_are_equal_to_their_twins_and_copies(make: Callable[[], nn.Module]) -> None:
    layer = make()
    assert model_signature(layer) == model_signature(make()) == model_signature(copy.deepcopy(layer))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: nn.Sequential(nn.ReLU(), nn.Tanh()), lambda: nn.Sequential(nn.Tanh(), nn.ReLU())),
        (lambda: nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()}), lambda: nn.ModuleDict(dict.fromkeys("ba", nn.ReLU()))),
        (lambda: with_parameters("a", "b"), lambda: with_parameters("b", "a")),
        (lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), lambda: nn.Sequential(*[nn.ReLU()] * 2)),
        (lambda: nn.LSTM(3, 4, dropout=0.0), lambda: nn.LSTM(3, 4, batch_first=True)),
    ],
)  # fmt: skip
def test_order_and_sharing(one: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> None:
    assert model_signature(one()) == model_signature(one())
    assert model_signature(one()) != model_signature(other())


def test_order_alone_can_be_told() -> None:
    one = model_signature(nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()}))
    other = model_signature(nn.ModuleDict({"b": nn.ReLU(), "a": nn.ReLU()}))
    told = difference(spec(one, "one"), spec(other, "other"))
    assert told == "'model: order of children' is b, a, expected a, b"


def local_model(body: Callable[[Any, Any], Any], constant: float = 1.0) -> nn.Module:
    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(self, x) * constant

    return Local()


def test_classes_of_one_factory() -> None:
    def make(constant: float) -> nn.Module:
        return local_model(lambda self, x: x + 1, constant)

    assert model_signature(make(2)) == model_signature(make(2))
    assert model_signature(make(2)) != model_signature(make(3))
    assert model_signature(make(2)) != model_signature(local_model(lambda self, x: x - 1, 2))


def test_a_frozen_teacher_counts_with_its_weights() -> None:
    def student(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = Net()
        torch.manual_seed(seed)
        net.teacher = [nn.Linear(3, 3)]  # type: ignore[assignment]
        return net

    assert model_signature(student(0)) == model_signature(student(0))
    assert model_signature(student(0)) != model_signature(student(1))


def test_a_module_outside_that_holds_the_model_ends() -> None:
    def make() -> nn.Module:
        net = Net()
        wrapper = nn.Sequential(net)
        net.outside = [wrapper]  # type: ignore[assignment]
        return net

    assert model_signature(make()) == model_signature(make())


def test_generators_and_lazy_parameters_equal_only_themselves() -> None:
    shared = torch.Generator()
    with_generator = [changed(lambda net: setattr(net, "g", shared)) for _ in range(2)]
    assert model_signature(with_generator[0]) == model_signature(with_generator[1])
    assert model_signature(with_generator[0]) != model_signature(
        changed(lambda net: setattr(net, "g", torch.Generator()))
    )
    lazy = nn.LazyLinear(3)
    assert model_signature(lazy) == model_signature(lazy) != model_signature(nn.LazyLinear(3))


def test_a_child_called_model() -> None:
    def make(flag: bool) -> nn.Module:
        outer = nn.Module()
        outer.model = nn.ReLU()
        outer.train(flag)
        return outer

    entries = dict(model_signature(make(True)))
    assert {"the model", "model", "the model.training", "model.training"} <= entries.keys()
    assert model_signature(make(True)) != model_signature(make(False))


def smoothed(by: float, weights: torch.Tensor | None = None) -> Callable[..., torch.Tensor]:
    return lambda p, t: F.cross_entropy(p, t, weight=weights, label_smoothing=by)


class Focal:
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def __call__(self, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(p, t) * self.gamma

    def other(self, p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(p, t)


LOSSES: list[Callable[[], Callable[..., Any]]] = [
    lambda: F.cross_entropy,
    lambda: F.mse_loss,
    lambda: smoothed(0.1),
    lambda: smoothed(0.2),
    lambda: smoothed(0.1, torch.ones(3)),
    lambda: smoothed(0.1, torch.arange(3.0)),
    lambda: functools.partial(F.cross_entropy, label_smoothing=0.1),
    lambda: functools.partial(F.cross_entropy, label_smoothing=0.2),
    lambda: nn.CrossEntropyLoss(),
    lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    lambda: nn.CrossEntropyLoss(weight=torch.ones(3)),
    lambda: nn.CrossEntropyLoss(weight=torch.arange(3.0)),
    lambda: Focal(1.0),
    lambda: Focal(2.0),
    lambda: Focal(2.0).other,
    lambda: lambda p, t: (p - t).pow(2).mean(),
    lambda: lambda p, t: (p - t).pow(4).mean(),
    lambda: lambda p, t, by=2: (p - t).pow(by).mean(),
    lambda: lambda p, t, by=4: (p - t).pow(by).mean(),
]


@pytest.mark.parametrize("make", LOSSES)
def test_a_loss_made_twice_is_equal(make: Callable[[], Callable[..., Any]]) -> None:
    first, second = callable_signature("loss", make()), callable_signature("loss", make())
    assert first == second
    assert hash(first) == hash(second)


def test_all_losses_differ() -> None:
    assert len({callable_signature("loss", make()) for make in LOSSES}) == len(LOSSES)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (Net(4), Net(8), "'fc1.out_features' is 8, expected 4"),
        (Net(rate=0.1), Net(rate=0.2), "'drop.p' is 0.2, expected 0.1"),
        (nn.ParameterList([torch.ones(2)]), nn.ParameterList([torch.ones(3)]), "'0' is (3,) float32, expected (2,) float32"),
        (Net(), changed(lambda net: net.fc1.requires_grad_(False)), "'fc1.weight' is (4, 3) float32, frozen, expected (4, 3) float32"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()), "'0' is Tanh, expected ReLU"),
        (Net(), changed(lambda net: net.norm.eval()), "'norm.training' is False, expected True"),
    ],
)  # fmt: skip
def test_a_difference_of_models_in_words(one: nn.Module, other: nn.Module, told: str) -> None:
    assert difference(spec(model_signature(one), "one"), spec(model_signature(other), "other")) == told


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (smoothed(0.1), smoothed(0.2), "'loss: captured by' is 0.2, expected 0.1"),
        (LOSSES[6](), LOSSES[7](), "'loss: argument label_smoothing' is 0.2, expected 0.1"),
        (LOSSES[8](), LOSSES[9](), "'loss.label_smoothing' is 0.1, expected 0.0"),
        (Focal(1.0), Focal(2.0), "'loss: gamma' is 2.0, expected 1.0"),
        (F.cross_entropy, F.mse_loss, "'loss' is mse_loss, expected cross_entropy"),
        (LOSSES[17](), LOSSES[18](), "'loss: default by' is 4, expected 2"),
    ],
)
def test_a_difference_of_losses_in_words(one: Any, other: Any, told: str) -> None:
    first, second = callable_signature("loss", one), callable_signature("loss", other)
    assert difference(spec(first, "one"), spec(second, "other")) == told


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_equals_only_itself() -> None:
    def make() -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Linear(2, 3)), nn.ReLU())

    model = make()
    assert model_signature(model) == model_signature(model) != model_signature(make())
