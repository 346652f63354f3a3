"""Results on disk: what is written, read back, and never lost; whatever the names, the configs and the disk are like."""

from __future__ import annotations

import enum
import errno
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import carpool
from carpool import Outcome, Result, Results, arrays, notation, saving
from carpool.arrays import Array
from carpool.errors import FileError, ModelError, OutOfRoomError, SaveError, StepError

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def make(width: int = 3) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
    )


def job(name: str = "a", **options: Any) -> carpool.Job:
    given = {
        "loss": F.mse_loss,
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "epochs": 2,
        "batch_size": 8,
    }
    return carpool.Job(make, (X, Y), name=name, **{**given, **options})


def train(*jobs: carpool.Job, **options: Any) -> Results:
    return carpool.train(jobs, **{"device": "cpu", "reporters": [], "compile": False, **options})


def one(name: str = "a", **fields: Any) -> Results:
    return Results([Result(name, Outcome.COMPLETED, **{"model": torch.nn.Linear(2, 1), **fields})])


def same(ours: Any, theirs: Any) -> bool:
    """Whether two nests are the same to the bit."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return type(ours) is type(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


# What is read back


def test_what_is_read_back_is_what_was_saved(tmp_path: Path):
    """Weights, buffers, optimizer and scheduler, to the bit, and all that a result says."""
    stop = carpool.EarlyStopping("val_loss", patience=1, restore_best=True)
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    options = {"validation_data": (X, -Y), "stop": stop, "scheduler": scheduler, "epochs": 6}
    results = train(*(job(f"j{seed}", seed=seed, config={"seed": seed}, **options) for seed in range(2)))
    results.save(tmp_path)
    read = carpool.load(tmp_path)
    assert (len(read), read.seconds, read.table()) == (2, results.seconds, results.table())
    for ours, theirs in zip(read, results, strict=True):
        for word in (
            "name",
            "outcome",
            "config",
            "history",
            "epoch",
            "held",
            "modes",
            "steps",
            "seconds",
            "strategy",
            "reason",
        ):
            assert getattr(ours, word) == getattr(theirs, word), word
        assert (ours.model, ours.optimizer, ours.error) == (None, None, None)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)
        assert ours.load_into(model, optimizer, schedule) == (model, optimizer)
        assert same(model.state_dict(), theirs.model.state_dict())
        assert same(optimizer.state_dict(), theirs.optimizer.state_dict())
        assert schedule.state_dict() == theirs.scheduler.state_dict()
        assert ours.load_into(make()).state_dict().keys() == model.state_dict().keys()
        np.testing.assert_array_equal(ours.weights["0.weight"], theirs.model[0].weight.detach().numpy())
        assert {name: value.tolist() for name, value in theirs.weights.items()} == {
            name: value.tolist() for name, value in ours.weights.items()
        }
        moments = ours.optimizer_state["optimizer"]["state"][0]["exp_avg"]
        assert moments.shape == (3, 4)


def test_the_weights_file_is_one_that_others_read(tmp_path: Path):
    results = one("lr=0.1,seed=3")
    results.save(tmp_path)
    path = tmp_path / "save-1" / "weights" / "lr=0.1,seed=3.safetensors"
    assert same(load_file(path), dict(results[0].model.state_dict()))


def test_what_was_read_can_be_saved_elsewhere(tmp_path: Path):
    train(job()).save(tmp_path / "one")
    carpool.load(tmp_path / "one").save(tmp_path / "two")
    first, second = (carpool.load(tmp_path / name)[0] for name in ("one", "two"))
    assert same(second.load_into(make()).state_dict(), first.load_into(make()).state_dict())
    assert str(first.optimizer_state) == str(second.optimizer_state)


def test_failures_are_saved_with_what_they_reached(tmp_path: Path):
    failed = [
        Result("a", Outcome.FAILED, error=ValueError("two\nlines"), model=torch.nn.Linear(2, 1), steps=3),
        Result("b", Outcome.OUT_OF_MEMORY, error=MemoryError("much")),
        Result("c", Outcome.DIVERGED, history={"loss": [1.0, math.nan, math.inf]}),
    ]
    Results(failed).save(tmp_path)
    read = carpool.load(tmp_path)
    assert [result.outcome for result in read] == [result.outcome for result in failed]
    assert [type(result.error) for result in read] == [StepError, OutOfRoomError, type(None)]
    assert str(read[0].error) == "ValueError: two lines"
    assert read[0].weights.keys() == {"weight", "bias"}
    assert str(read[2].history["loss"]) == "(1.0, nan, inf)"
    assert read[1].weights == {}
    with pytest.raises(FileError, match="weights of job 'b'"):
        read[1].load_into(torch.nn.Linear(2, 1))


def test_a_model_of_another_structure_is_refused(tmp_path: Path):
    train(job()).save(tmp_path)
    read = carpool.load(tmp_path)[0]
    for other, named in ((make(5), "0.weight"), (torch.nn.Linear(4, 3), "0.weight")):
        with pytest.raises(ModelError, match=named):
            read.load_into(other)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]
)
def test_every_type_of_numbers_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype):
    model = torch.nn.Linear(3, 2).to(dtype)
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("none", torch.empty(0, 3))
    one(model=model).save(tmp_path)
    again = torch.nn.Linear(3, 2).to(dtype)
    again.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
    again.register_buffer("none", torch.empty(0, 3))
    read = carpool.load(tmp_path)[0]
    assert same(dict(read.load_into(again).state_dict()), dict(model.state_dict()))
    np.testing.assert_array_equal(
        read.weights["weight"].astype(np.complex128), model.weight.detach().to(torch.complex128).numpy()
    )


def test_weights_that_are_one_are_written_once(tmp_path: Path):
    def tied() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        model[1].weight = model[0].weight
        return model

    model = tied()
    one(model=model).save(tmp_path)
    (path,) = (tmp_path / "save-1" / "weights").iterdir()
    assert path.stat().st_size < 2 * 64 * 64 * 4
    read = carpool.load(tmp_path)[0]
    assert read.weights.keys() == model.state_dict().keys()
    again = read.load_into(tied())
    assert again[0].weight is again[1].weight
    assert same(dict(again.state_dict()), dict(model.state_dict()))


# Names and configs


NAMES = [
    "a/b",
    "a\\b",
    "..",
    ".",
    "a.",
    "-a",
    "a\nb",
    "a\0b",
    "\udc80",
    "日本",
    "x" * 300,
    "x" * 299 + "y",
    "A",
    "a",
    "con:*?",
]


def test_any_names_are_saved_under_files_of_their_own(tmp_path: Path):
    """Slashes, dots, newlines, zeros, surrogates, 300 characters, names that differ in case alone."""
    results = Results([Result(name, Outcome.COMPLETED, model=torch.nn.Linear(1, 1)) for name in NAMES])
    results.save(tmp_path)
    read = carpool.load(tmp_path)
    assert [result.name for result in read] == NAMES
    for name in NAMES:
        assert read[name].weights["weight"] == results[name].model.weight.detach().numpy()
    files = [path.name for path in (tmp_path / "save-1" / "weights").iterdir()]
    assert len({name.lower() for name in files}) == len(NAMES)
    assert all(name.isascii() and name.isprintable() and len(name) < 150 for name in files)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "save-1"}


class Colour(enum.Enum):
    RED = 1


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class IntColour(enum.IntEnum):
    RED = 1


ROUND = {
    "a tuple": (1, (2.5, "x"), [3]),
    "numbers": [True, None, -1, 2**70, 1e-300],
    "keys": {1: "a", (2, 3): "b", "$tuple": [1]},
    "text": 'ü\udc80"\\\n\x00',
    "nest": {"deep": {"er": ({"x": 1},)}},
}
SHOWN = {
    "function": max,
    "partial": partial(max, 1),
    "enum": Colour.RED,
    "class": Colour,
    "numbers": IntColour.RED,
    "set": {1},
}


def test_any_config_is_saved(tmp_path: Path):
    """What JSON can hold comes back as it was; NumPy's numbers as Python's; everything else as the text that shows it."""
    nan = {"nan": float("nan"), "inf": (math.inf, -math.inf)}
    numpy = {"f": np.float32(0.1), "i": np.int64(3), "b": np.bool_(True), "nan": np.float64("nan")}
    array = {"array": np.arange(6, dtype=np.int32).reshape(2, 3)}
    endless: list[Any] = []
    endless.append(endless)
    odd = {"mute": Mute(), "endless": endless, "long": 10**5000}
    configs = [ROUND, SHOWN, nan, numpy, array, odd]
    made = [Result(str(i), Outcome.COMPLETED, config=config) for i, config in enumerate(configs)]
    Results(made).save(tmp_path)
    rounded, shown, nans, numbers, arrayed, odds = (result.config for result in carpool.load(tmp_path))
    assert same(rounded, ROUND)
    assert shown == {key: repr(value) for key, value in SHOWN.items()}
    assert str(nans) == str(nan)
    assert str(numbers) == str({"f": float(np.float32(0.1)), "i": 3, "b": True, "nan": math.nan})
    assert numbers["f"] == np.float32(0.1)
    assert arrayed["array"].dtype == np.int32
    assert arrayed["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert odds["mute"] == "<Mute>"
    assert odds["long"] == 10**5000
    assert "nan" not in json.loads(
        (tmp_path / "results.json").read_text(), parse_constant=lambda word: pytest.fail(word)
    )


def test_a_metric_of_several_numbers_is_saved(tmp_path: Path):
    one(model=None, history={"f1": [np.array([0.1, 0.2], np.float32)]}).save(tmp_path)
    read: Any = carpool.load(tmp_path)[0].history["f1"][0]
    assert read.tolist() == np.array([0.1, 0.2], np.float32).tolist()


def test_a_job_whose_arrays_cannot_be_written_costs_the_others_nothing(tmp_path: Path):
    class Broken(torch.nn.Linear):
        def state_dict(self, *arguments: Any, **options: Any) -> Any:
            raise RuntimeError("not today")

    results = Results([Result("a", Outcome.COMPLETED, model=Broken(1, 1)), *one("b")])
    with pytest.warns(UserWarning, match="arrays of 1 jobs could not be saved: a: RuntimeError: not today"):
        results.save(tmp_path)
    read = carpool.load(tmp_path)
    assert (read["a"].weights, read["b"].weights.keys()) == ({}, {"weight", "bias"})


# A full disk, and whose folder it is


@contextmanager
def no_room(most_bytes: int) -> Iterator[None]:
    """No file grows beyond this."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_earlier_save_and_loses_nothing(tmp_path: Path):
    earlier = one("earlier")
    earlier.save(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    results = Results([*one("small"), *one("large", model=torch.nn.Linear(300, 300))])
    with no_room(100_000), pytest.raises(SaveError, match="Received: OSError") as caught:
        results.save(tmp_path)
    assert caught.value.results is results
    assert isinstance(caught.value, OSError)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    results.save(tmp_path)
    assert [result.name for result in carpool.load(tmp_path)] == ["small", "large"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_last_leaves_the_earlier_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    one("earlier").save(tmp_path)

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(SaveError, match="Input/output error"):
            one("later").save(tmp_path)
    assert [result.name for result in carpool.load(tmp_path)] == ["earlier"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "save-1"]


def test_saving_again_replaces_what_was_there_and_nothing_else(tmp_path: Path):
    (tmp_path / "mine.safetensors").write_bytes(b"mine")
    for name in ("a", "b", "c"):
        one(name).save(tmp_path)
        assert [result.name for result in carpool.load(tmp_path)] == [name]
        folders = [path for path in tmp_path.iterdir() if path.is_dir()]
        assert len(folders) == 1
    assert (tmp_path / "mine.safetensors").read_bytes() == b"mine"


def test_folders_that_cannot_take_results_are_refused(tmp_path: Path):
    """A file, a folder below one, and one with somebody else's results.json; the error carries the results."""
    (tmp_path / "file").write_text("")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "results.json").write_text('{"jobs": "theirs"}')
    for folder in ("file", "file/below", "theirs"):
        with pytest.raises(FileError, match=folder.split("/")[0]):
            saving.check(tmp_path / folder)
        results = one()
        with pytest.raises(SaveError) as caught:
            results.save(tmp_path / folder)
        assert caught.value.results is results
    assert (tmp_path / "theirs" / "results.json").read_text() == '{"jobs": "theirs"}'
    one().save(tmp_path / "ours")
    saving.check(tmp_path / "ours")


# What is no save of ours


def test_a_folder_without_results_says_so(tmp_path: Path):
    with pytest.raises(FileError, match=r"results\.json"):
        carpool.load(tmp_path)
    with pytest.raises(FileError, match="nowhere"):
        carpool.load(tmp_path / "nowhere")


def test_a_save_that_was_changed_is_refused(tmp_path: Path):
    """Another format, a word that is missing, a path that leads out of the folder, an array that is cut off."""
    one().save(tmp_path)
    path = tmp_path / "results.json"
    index = json.loads(path.read_text())
    entry = index["jobs"][0]
    for changes in (
        {"format": 99},
        {"jobs": [{}]},
        {"jobs": [{**entry, "weights": "../../etc/passwd"}]},
        {"jobs": [{**entry, "weights": "/etc/passwd"}]},
        {"jobs": [{**entry, "outcome": "splendid"}]},
        {"jobs": [{**entry, "config": {"$run": "rm"}}]},
    ):
        path.write_text(json.dumps({**index, **changes}))
        with pytest.raises(FileError, match=r"results\.json that this carpool can read"):
            carpool.load(tmp_path)
    path.write_text(json.dumps(index))
    file = tmp_path / entry["weights"]
    for data in (file.read_bytes()[:-1], b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]"):
        file.write_bytes(data)
        with pytest.raises(FileError, match="a safetensors file"):
            carpool.load(tmp_path)[0].weights  # noqa: B018


def test_types_that_numpy_has_not_are_read_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    values = torch.tensor([1.5, -2.25, 3e38]).to(torch.bfloat16)
    array = Array.named("bfloat16", (3,), values.view(torch.uint8).numpy().tobytes())
    assert array.numpy().tolist() == values.tolist()


def test_arrays_keep_their_order_and_lie_aligned(tmp_path: Path):
    given = {"b": Array.of(np.array([True])), "a": Array.of(np.arange(2.0)), "c": Array.of(np.float32(1))}
    arrays.write(tmp_path / "x.safetensors", given, {"about": "them"})
    read, told = arrays.read(tmp_path / "x.safetensors")
    assert (list(read.items()), told) == (list(given.items()), {"about": "them"})
    with pytest.raises(TypeError, match="object"):
        Array.of(np.array([object()]))


def test_words_of_the_notation_in_a_mapping_of_the_users_are_only_words():
    assert notation.read(notation.written({"$at": "x"})) == {"$at": "x"}
    assert notation.read(notation.written({"a": {"$float": "nan"}})) == {"a": {"$float": "nan"}}


# When everything failed


def failing(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise OSError("the share is gone")


class Late:
    """Batches that end with an error in their third epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.epochs += 1
        for _ in range(2):
            yield X[:8], Y[:8]
            if self.epochs == 3:
                raise OSError("the share is gone")

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_the_error_of_a_run_in_which_every_job_failed_carries_what_they_reached(
    strategy: str, tmp_path: Path
):
    """A source that all share died late: histories, weights and optimizers are there, and can be saved."""
    source = Late()
    jobs = [
        carpool.Job(make, source, name=name, loss=F.mse_loss, optimizer=torch.optim.Adam, epochs=9)
        for name in "ab"
    ]
    if strategy == "in_turn":
        jobs = jobs[:1]
    with pytest.raises(OSError, match="the share is gone") as caught:
        train(*jobs, strategy=strategy)
    results = caught.value.results  # pyright: ignore[reportAttributeAccessIssue]
    assert {result.outcome for result in results} == {Outcome.FAILED}
    assert all(len(result.history["loss"]) == 2 and result.steps >= 4 for result in results)
    results.save(tmp_path)
    for ours, theirs in zip(carpool.load(tmp_path), results, strict=True):
        assert same(ours.load_into(make()).state_dict(), theirs.model.state_dict())
        assert ours.optimizer_state["optimizer"]["state"]


def test_an_error_that_is_raised_at_once_carries_what_there_is():
    """Those that had ended are there as they ended."""
    jobs = [job("sound"), job("broken", loss=failing)]
    with pytest.raises(OSError, match="gone") as caught:
        train(*jobs, strategy="in_turn", on_error="raise")
    results = caught.value.results  # pyright: ignore[reportAttributeAccessIssue]
    assert [result.outcome.word for result in results] == ["completed", "failed"]
    assert len(results["sound"].history["loss"]) == 2
    assert results["broken"].error is caught.value


class Sealed(Exception):
    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_an_error_that_takes_no_attribute_is_the_cause_of_one_that_does():
    def sealed(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise Sealed("mine")

    with pytest.raises(StepError, match="Sealed: mine") as caught:
        train(job(loss=sealed))
    assert isinstance(caught.value.__cause__, Sealed)
    assert caught.value.results[0].error is caught.value.__cause__  # pyright: ignore[reportAttributeAccessIssue]
