"""Predictions of many models together are those of each alone, and the models stay as they were."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import carpool
from carpool import machine
from carpool.adapters.torch import predict as torch_predict
from carpool.adapters.torch import predicting
from carpool.errors import DataError, DeviceError, ModelError, OptionError

x = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def normed() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    made(torch.randn(20, 6))  # running statistics of its own
    return made


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layer(x)
        return {"hidden": hidden, "both": (hidden.sum(-1), hidden.argmax(-1))}


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        return made * 2 if made.mean() > 0 else made


class Constant(nn.Module):
    """An output that is no tensor: vmap refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), "a word"


class Counting(nn.Module):
    """Writes into a buffer in evaluation mode too."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x) * self.seen


class Remembering(nn.Module):
    """Leaves what it made in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(x)
        return self.last


class Overwriting(nn.Module):
    """Writes into its input, with what is the same for all and with what is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x, inplace=True).mul_(self.scale)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor, sign: int = 1) -> torch.Tensor:
        return self.layer(a) + sign * self.layer(b)


def make(kind: Any, count: int = 3) -> list[nn.Module]:
    torch.manual_seed(1)
    return [kind() for _ in range(count)]


def alone(models: list[Any], *arguments: Any, **keywords: Any) -> list[Any]:
    twins = [copy.deepcopy(model).eval() for model in models]
    with torch.no_grad():
        return [twin(*copy.deepcopy(arguments), **copy.deepcopy(keywords)) for twin in twins]


def assert_close(made: Any, expected: Any) -> None:
    assert pytree.tree_structure(made) == pytree.tree_structure(expected)
    for one, other in zip(pytree.tree_leaves(made), pytree.tree_leaves(expected), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        else:
            assert one == other


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """How many models each stack had, and how many times one ran alone."""
    seen: dict[str, list[int]] = {"together": [], "alone": []}
    together, in_turn = torch_predict._together, torch_predict._alone

    def note_together(models: Any, *rest: Any) -> Any:
        made = together(models, *rest)
        seen["together"].append(len(models))
        return made

    def note_alone(model: Any, *rest: Any) -> Any:
        seen["alone"].append(1)
        return in_turn(model, *rest)

    monkeypatch.setattr(torch_predict, "_together", note_together)
    monkeypatch.setattr(torch_predict, "_alone", note_alone)
    return seen


@pytest.fixture(params=["as torch runs them", "as machine code"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code wherever there can be any, or none."""
    if request.param == "as machine code":
        if machine.unavailable() is not None:
            pytest.skip("no C compiler")
        monkeypatch.setattr(predicting, "_FORCED", True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("batch_size", [None, 4, 100])
@pytest.mark.parametrize("kind", [plain, normed, Nested, Overwriting, Counting])
def test_one_structure_predicts_as_alone(kind: Any, batch_size: int | None):
    models = make(kind)
    given = x.clone()
    assert_close(
        carpool.predict(models, given, batch_size=batch_size, device="cpu"), alone(models, x.clone())
    )
    assert torch.equal(given, x)


@pytest.mark.parametrize("kind", [plain, normed, Nested, Counting])
def test_what_can_be_stacked_is(kind: Any, runs):
    carpool.predict(make(kind), x, device="cpu")
    assert runs == {"together": [3], "alone": []}


@pytest.mark.parametrize("kind", [Conditional, Constant, Remembering, Overwriting])
def test_what_cannot_be_stacked_runs_in_turn(kind: Any, runs):
    models = make(kind)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert runs["alone"] == [1, 1, 1]


def test_other_structures_and_duplicates_keep_their_places(runs):
    a, b, c = make(plain)
    wide, counting = nn.Linear(6, 3), make(normed, 1)[0]
    models = [a, wide, b, a, counting, c]
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert runs == {"together": [3], "alone": [1, 1]}


def test_a_mode_that_differs_is_no_difference(runs):
    models = make(normed)
    models[1].eval()
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert runs["together"] == [3]
    assert [model.training for model in models] == [True, False, True]
    assert all(part.training for part in models[0].modules())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", [plain, normed, Counting, Conditional])
def test_models_stay_as_they_were(kind: Any):
    models = make(kind)
    models[0].eval()
    before = [copy.deepcopy(model.state_dict()) for model in models]
    carpool.predict(models, x, device="cpu", batch_size=4)
    for model, state in zip(models, before, strict=True):
        for name, leaf in model.state_dict().items():
            assert torch.equal(leaf, state[name])
    assert [model.training for model in models] == [False, True, True]
    assert all(leaf.requires_grad and leaf.grad is None for model in models for leaf in model.parameters())


@pytest.mark.usefixtures("way")
def test_what_a_forward_pass_leaves_in_its_model_is_its_own():
    models = make(Remembering)
    made = carpool.predict(models, x, device="cpu")
    assert_close([model.last for model in models], made)


@pytest.mark.usefixtures("way")
def test_a_hook_sees_each_model_alone():
    models, seen = make(plain), []
    for model in models:
        model.register_forward_hook(lambda _, __, output: seen.append(output.clone()))
    made = carpool.predict(models, x, device="cpu")
    assert_close(seen, made)


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


@pytest.mark.usefixtures("way")
def test_a_shared_trunk_is_computed_once_a_batch():
    trunk = (
        nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).eval().requires_grad_(False)
    )
    models = [Headed(trunk) for _ in range(5)]
    with FlopCounterMode(display=False) as counter:
        made = carpool.predict(models, x, batch_size=5, device="cpu")
    assert counter.get_total_flops() == 2 * len(x) * (6 * 64 + 64 * 64) + 5 * 2 * len(x) * 64 * 2
    assert_close(made, alone(models, x))


@pytest.mark.usefixtures("way")
def test_a_model_that_returns_what_all_share_returns_a_copy():
    trunk = nn.Linear(6, 4)
    models = [nn.ModuleDict({"trunk": trunk, "own": nn.Linear(1, 1)}) for _ in range(3)]
    for model in models:
        model.forward = _Trunk(model)
    made = carpool.predict(models, x, device="cpu")
    made[0].zero_()
    torch.testing.assert_close(made[1], trunk(x).detach())


class _Trunk:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model["trunk"](x)


def test_a_long_list_is_stacked_in_slices(monkeypatch: pytest.MonkeyPatch, runs):
    models = make(plain, 7)
    member = sum(p.nbytes for p in models[0].parameters()) + 4 * len(x) * 6 * 4
    monkeypatch.setattr(torch_predict, "_LARGEST_STACK_BYTES", 3 * member)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert runs == {"together": [3, 3], "alone": [1]}


def test_too_little_memory_halves_the_slices(monkeypatch: pytest.MonkeyPatch):
    models, widths = make(plain, 6), []
    together = torch_predict._together

    def short(models: Any, *rest: Any) -> Any:
        widths.append(len(models))
        if len(models) > 2:
            raise torch.OutOfMemoryError("not enough")
        return together(models, *rest)

    monkeypatch.setattr(torch_predict, "_together", short)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert widths == [6, 3]  # then one by one


@pytest.mark.usefixtures("way")
def test_inputs_by_position_by_name_and_as_one_dict():
    models = make(Two)
    both = (x, x + 1)
    assert_close(carpool.predict(models, both, batch_size=3, device="cpu"), alone(models, *both))
    named = {"a": x, "b": x + 1, "sign": -1}
    assert_close(carpool.predict(models, named, batch_size=3, device="cpu"), alone(models, **named))
    takes_dict = make(partial(_Dict))
    assert_close(carpool.predict(takes_dict, ({"x": x},), device="cpu"), alone(takes_dict, {"x": x}))


class _Dict(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)

    def forward(self, input: Any) -> torch.Tensor:
        return super().forward(input["x"])


@pytest.mark.usefixtures("way")
def test_numpy_arrays_come_back_as_tensors():
    models = make(plain)
    made = carpool.predict(models, x.numpy(), batch_size=np.int64(4), device="cpu")  # type: ignore[arg-type]
    assert_close(made, alone(models, x))


@pytest.mark.usefixtures("way")
def test_a_mapping_and_results_come_back_by_name():
    models = dict(zip("abc", make(plain), strict=True))
    by_name = carpool.predict(models, x, device="cpu")
    assert list(by_name) == ["a", "b", "c"]
    job = partial(carpool.Job, plain, (x, torch.zeros(10, 3)), loss=F.mse_loss, optimizer=torch.optim.SGD)
    results = carpool.train([job(name=f"s{seed}", seed=seed) for seed in range(2)], reporters=[])
    of_results = carpool.predict(results, x)
    assert list(of_results) == ["s0", "s1"]
    assert_close(list(of_results.values()), alone([result.model for result in results], x))


def test_results_without_a_model_are_named():
    bad = carpool.Result("b", carpool.Outcome.FAILED, error=ValueError("no"))
    results = carpool.Results([carpool.Result("a", carpool.Outcome.COMPLETED, model=plain()), bad])
    with pytest.raises(ModelError, match=r"none in 'b', which raised an error \(ValueError: no\)"):
        carpool.predict(results, x)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("models", "inputs", "options", "error", "words"),
    [
        ([], x, {}, ModelError, "at least one model"),
        ({}, x, {}, ModelError, "at least one model"),
        (plain(), x, {}, ModelError, r"Received: Sequential. Remedy: pass \[model\]"),
        ([plain(), 3], x, {}, ModelError, "Received: int"),
        ([plain()], x[:0], {}, DataError, "at least one sample"),
        ([plain()], (), {}, DataError, "a torch tensor or NumPy array"),
        ([plain()], [[1.0, 2.0]], {}, DataError, "a torch tensor or NumPy array"),
        ([plain()], x, {"batch_size": 0}, OptionError, "batch_size of at least 1"),
        ([plain()], x, {"batch_size": 1.5}, OptionError, "batch_size of at least 1"),
        ([plain()], x, {"device": "tpu"}, DeviceError, "a device out of"),
        ([Two()], (x, x[:3]), {"batch_size": 2}, DataError, r"lengths \[10, 3\]"),
    ],
)
def test_misuse_is_told(models: Any, inputs: Any, options: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        carpool.predict(models, inputs, **options)


class _Mean(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).mean()


@pytest.mark.usefixtures("way")
def test_outputs_that_batches_cannot_be_joined_of_are_told():
    models = make(_Mean)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    with pytest.raises(DataError, match=r"Received: \(\) from a batch of 4"):
        carpool.predict(models, x, batch_size=4, device="cpu")


@pytest.mark.usefixtures("way")
def test_a_model_s_own_error_comes_through():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        carpool.predict(make(plain), x[:, :4], device="cpu")
