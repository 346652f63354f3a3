"""Predictions as machine code are those of the models alone; what cannot run so runs as it always did."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import carpool
from carpool import machine
from carpool.adapters.torch import predicting
from carpool.adapters.torch.inputs import read_inputs
from carpool.errors import DataError

pytestmark = pytest.mark.skipif(machine.unavailable() is not None, reason="no C compiler")


class Says(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x).mean(1))


class Masked(nn.Module):
    """Several inputs: samples, which of their numbers count, a number for all, and a word."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor, way: str) -> torch.Tensor:
        made = self.layer(torch.where(mask, x, 0.0)) * scale
        return made.tanh() if way == "bent" else made


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x).mean(1))


def trained(model: nn.Module, like: torch.Tensor) -> nn.Module:
    """With running statistics of its own."""
    for _ in range(3):
        model(torch.randn_like(like[:20]) + 1)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Dropout(0.5), nn.Linear(9, 3), nn.Softmax(-1))


def normed() -> nn.Module:
    return trained(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), rows(20))


def cnn() -> nn.Module:
    made = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    return trained(made, images(20))


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count))


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(count))


def steps(count: int) -> torch.Tensor:
    return torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(count))


def words(count: int) -> torch.Tensor:
    return torch.arange(count * 3).view(count, 3) % 7


def nested(made: torch.Tensor) -> Any:
    return {"made": made, "both": (made.sum(-1), [made.argmax(-1), made > 0]), "same": made}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (mlp, rows),
    "normed": (normed, rows),
    "double": (lambda: mlp().double(), lambda count: rows(count).double()),
    "cnn": (cnn, images),
    "words": (Words, words),
    "lstm": (Recurrent, steps),
    "attention": (Attending, steps),
    "nest": (partial(Says, nested), rows),
    "sorted by one": (partial(Says, lambda made: made.cumsum(1).flip(1).transpose(0, 1).T), rows),
}


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests found out is forgotten."""
    monkeypatch.setattr(predicting, "_structures", OrderedDict())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Machine code wherever there can be any; for each group whether there was."""
    seen: list[bool] = []
    predicted = predicting.predicted

    def noted(task: predicting.Task) -> Any:
        made = predicted(task)
        seen.append(made.is_own)
        return made

    monkeypatch.setattr(predicting, "_FORCED", True)
    monkeypatch.setattr("carpool.adapters.torch.predict.predicted", noted)
    return seen


def several(make: Callable[[], nn.Module], count: int = 3) -> list[nn.Module]:
    torch.manual_seed(1)
    return [make() for _ in range(count)]


def alone(models: list[Any], *arguments: Any) -> list[Any]:
    twins = [copy.deepcopy(model).eval() for model in models]
    with torch.no_grad():
        return [twin(*copy.deepcopy(arguments)) for twin in twins]


def assert_close(made: Any, expected: Any) -> None:
    assert pytree.tree_structure(made) == pytree.tree_structure(expected)
    for one, other in zip(pytree.tree_leaves(made), pytree.tree_leaves(expected), strict=True):
        assert one.dtype == other.dtype
        double = other.dtype == torch.float64
        near = 1e-12 if double else 1e-5
        torch.testing.assert_close(one, other, rtol=near, atol=near)


@pytest.mark.parametrize(("count", "batch_size"), [(7, None), (300, None), (300, 9), (128, 128), (131, 130)])
@pytest.mark.parametrize("name", MODELS)
def test_models_say_what_they_say_alone(name: str, count: int, batch_size: int | None, taken: list[bool]):
    make, inputs = MODELS[name]
    models, x = several(make), inputs(count)
    assert_close(carpool.predict(models, x, batch_size=batch_size, device="cpu"), alone(models, x))
    assert taken == [True]


@pytest.mark.parametrize("batch_size", [None, 50])
def test_several_inputs_and_what_is_the_same_for_all_samples(batch_size: int | None, taken: list[bool]):
    models, x = several(Masked), rows(300)
    given = (x.t().contiguous().t(), x > 0, torch.tensor(2.0, requires_grad=True), "bent")
    made = carpool.predict(models, given, batch_size=batch_size, device="cpu")
    with torch.no_grad():
        assert_close(made, alone(models, *(g.detach() if isinstance(g, torch.Tensor) else g for g in given)))
    straight = carpool.predict(models, (*given[:3], "straight"), device="cpu")
    assert not torch.equal(made[0], straight[0])
    assert taken == [True, True]


def test_inputs_that_require_grad_give_outputs_that_do_not(taken: list[bool]):
    models, x = several(mlp), rows(200).requires_grad_()
    made = carpool.predict(models, x, device="cpu")
    assert taken == [True]
    assert not any(one.requires_grad for one in made)


def test_outputs_have_memory_of_their_own(taken: list[bool]):
    models = several(mlp)
    made = carpool.predict([models[0], models[1], models[0]], rows(200), device="cpu")
    assert len({one.untyped_storage().data_ptr() for one in made}) == 3
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in made)
    torch.testing.assert_close(made[0], made[2])
    assert taken == [True]


def test_a_trunk_that_all_share_is_read_in_place(taken: list[bool]):
    trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU()).requires_grad_(False)
    models, x = several(lambda: Headed(trunk)), rows(200)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert taken == [True]


def test_models_stay_as_they_were(taken: list[bool]):
    models = several(cnn)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    carpool.predict(models, images(200), device="cpu")
    assert taken == [True]
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(leaf, state[name]) for name, leaf in model.state_dict().items())
        assert all(part.training for part in model.modules())


def test_new_weights_are_read_by_the_code_that_is_there(taken: list[bool]):
    x = rows(200)
    for models in (several(mlp), several(mlp, 5)[2:]):
        assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert taken == [True, True]


# Where rows are not made of one sample alone

BETWEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean": lambda made: made - made.mean(0),
    "softmax": lambda made: made.softmax(0),
    "cumulative": lambda made: made.cumsum(0),
    "flipped": lambda made: made.flip(0),
    "rolled": lambda made: made + made.roll(1, 0),
    "products": lambda made: made @ made.T @ made,
    "largest": lambda made: made.gather(0, made.argmax(0, keepdim=True)).expand_as(made) + 0 * made,
    "total": lambda made: (made, made.sum()),
    "transposed": lambda made: made.T,
}
PLACES: dict[str, Callable[[torch.Tensor], Any]] = {
    "length": lambda made: made / len(made),
    "position": lambda made: made + torch.arange(len(made))[:, None],
    "counted": lambda made: made + torch.ones_like(made).cumsum(0),
}


@pytest.mark.parametrize("name", [*BETWEEN, *PLACES])
def test_what_reads_a_batch_as_a_whole_reads_the_user_s(name: str, taken: list[bool]):
    models, x = several(partial(Says, (BETWEEN | PLACES)[name])), rows(300)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    parts = [alone(models, part) for part in x.split(50)]
    if name not in ("total", "transposed"):
        made = carpool.predict(models, x, batch_size=50, device="cpu")
        assert_close(made, [torch.cat(own) for own in zip(*parts, strict=True)])


@pytest.mark.parametrize("name", BETWEEN)
def test_loops_show_which_rows_are_made_of_several_samples(name: str):
    assert not forward(Says(BETWEEN[name]), rows(16)).is_apart


@pytest.mark.parametrize("name", MODELS)
def test_loops_show_which_rows_are_made_of_one(name: str):
    make, inputs = MODELS[name]
    assert forward(make(), inputs(16)).is_apart


def forward(model: nn.Module, x: torch.Tensor) -> Any:
    inputs = read_inputs(x)
    task = predicting.Task([model.eval()] * 2, inputs, [inputs], list, list, list, list)  # type: ignore[arg-type]
    one = predicting._Predicting(task)
    with torch.no_grad():
        return predicting.forward_of(model, one._names, one._examples(len(x)), inputs, len(x))


# What is refused


class Random(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(input), 0.5)


class Half(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3, dtype=torch.bfloat16)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.bfloat16()).float()


@pytest.mark.parametrize(
    "make",
    [
        partial(Says, torch.linalg.pinv),
        partial(Says, lambda x: (x, "word")),
        partial(Says, torch.nonzero),
        Half,
    ],
)
def test_what_has_no_code_runs_as_before(make: Callable[[], nn.Module], taken: list[bool]):
    models, x = several(make), rows(200)
    made, own = carpool.predict(models, x, device="cpu"), alone(models, x)
    for one, other in zip(pytree.tree_leaves(made), pytree.tree_leaves(own), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)  # Half's, which rounds as vmap does
    assert taken == [False]


def test_random_numbers_are_torch_s(taken: list[bool]):
    carpool.predict(several(Random), rows(200), device="cpu")
    assert taken == [False]


def test_under_autocast_torch_runs(taken: list[bool]):
    with torch.autocast("cpu", torch.bfloat16):
        made = carpool.predict(several(mlp), rows(200), device="cpu")
    assert taken == [False]
    assert made[0].dtype == torch.float32  # softmax


def test_a_word_that_is_not_there_raises_the_model_s_own_error(taken: list[bool]):
    models, x = several(Words), words(200)
    carpool.predict(models, x, device="cpu")
    x[-1, -1] = 7
    with pytest.raises(IndexError, match="out of range"):
        carpool.predict(models, x, device="cpu")
    assert taken == [True]  # and no answer to the second


def test_no_samples_are_told(taken: list[bool]):
    with pytest.raises(DataError, match="at least one sample"):
        carpool.predict(several(mlp), rows(5)[:0], device="cpu")


def test_a_compiler_that_fails_is_not_heard_of(taken: list[bool], monkeypatch: pytest.MonkeyPatch):
    def fails(code: Any) -> Any:
        raise machine.NoMachineCode("it fails")

    monkeypatch.setattr(predicting.launch, "prepared", fails)
    models, x = several(mlp), rows(200)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert taken == [False]


def test_code_that_says_otherwise_than_the_model_is_not_used(
    taken: list[bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(predicting, "_agree", lambda made, own: False)
    models, x = several(mlp), rows(200)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert taken == [False]


def test_little_work_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch):
    def traced(*_: Any) -> Any:
        raise AssertionError("it was traced")

    monkeypatch.setattr(predicting, "forward_of", traced)
    carpool.predict(several(mlp), rows(1_000), device="cpu")
    carpool.predict(several(mlp), rows(3_000), device="cpu")


def test_what_was_found_faster_is_used_again_without_a_look(monkeypatch: pytest.MonkeyPatch):
    looks: list[int] = []

    def plain_s(piece: predicting.Task) -> float:
        looks.append(len(piece.models))
        return 1e3

    monkeypatch.setattr(predicting, "_plain_s", plain_s)
    models, x = several(mlp), rows(3_000)
    assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    count = len(looks)
    assert count > 0
    assert_close(carpool.predict(models, x + 1, device="cpu"), alone(models, x + 1))
    assert len(looks) == count


def test_what_was_found_slower_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch, taken: list[bool]):
    monkeypatch.setattr(predicting, "_FORCED", False)
    monkeypatch.setattr(predicting, "_plain_s", lambda piece: 1e3)
    monkeypatch.setattr(predicting._Predicting, "_is_faster", lambda *_: False)
    models, x = several(partial(Says, lambda made: made.exp())), rows(3_000)
    for _ in range(2):
        assert_close(carpool.predict(models, x, device="cpu"), alone(models, x))
    assert taken == [False, False]
