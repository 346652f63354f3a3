"""A machine that is not as machine code wants it: a run trains all the same, to the same numbers, and says once what it did."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import carpool
from carpool import cache, machine, processor
from carpool.adapters.torch import programs
from carpool.errors import FusionError
from carpool.events import Event, GroupCompiled
from carpool.machine import compilers, kept
from carpool.windows import Measured

COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler, to take it away")

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what belongs to somebody else")
VERSION = 'case "$*" in *--version*) echo "fake 1.0"; exit 0;; esac'
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1).gt(0).long()


@pytest.fixture(autouse=True)
def asked_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short run tries machine code too, and it counts as the faster way."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(programs, "FEWEST_LAUNCHES", 1)
    monkeypatch.setattr(programs, "machine_guess_s", lambda code: 0.0)
    monkeypatch.setattr(programs, "measured", lambda ways: Measured((1.0, 0.0), agrees=True, busy=False))
    programs._paces.clear()
    cache._say_once.cache_clear()
    programs._told.clear()
    machine._desk.cache_clear()
    yield
    programs._paces.clear()
    compilers.kill_all()
    machine._desk.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes a shell script that is the only compiler on PATH."""

    def write(body: str) -> None:
        script = tmp_path / "bin" / "cc"
        script.parent.mkdir()
        script.write_text(f"#!/bin/sh\n{VERSION}\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent))

    return write


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def jobs(epochs: int = 3) -> list[carpool.Job]:
    """With a batch that is not whole, and validation: three kinds of steps."""
    return [
        carpool.Job(
            net,
            (X[:20], Y[:20]),
            validation_data=(X[20:], Y[20:]),
            loss=F.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.1 * (seed + 1)),
            batch_size=8,
            epochs=epochs,
            seed=seed,
            name=str(seed),
        )
        for seed in range(2)
    ]


def train(compile: str | bool = "auto") -> tuple[carpool.Results, set[str]]:
    """What came out, and how the steps ran."""
    events: list[Event] = []
    results = carpool.train(
        jobs(), device="cpu", strategy="fused", compile=compile, reporters=[events.append]
    )
    return results, {event.form for event in events if isinstance(event, GroupCompiled)}


def weights(results: Sequence[carpool.Result]) -> list[torch.Tensor]:
    return [tensor for result in results for tensor in result.model.state_dict().values()]


def assert_trains(form: str) -> None:
    """To the numbers of a run that is not compiled, in this form."""
    found, forms = train()
    assert forms == {form}
    plain, _ = train(compile=False)
    for one, other in zip(weights(found), weights(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for one, other in zip(found, plain, strict=True):
        assert one.history["val_loss"] == pytest.approx(other.history["val_loss"], rel=1e-12)


def programs_kept(folder: Path) -> list[Path]:
    return sorted((folder / "machine").glob("*.so"))


# Compilers


@pytest.fixture
def nothing_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("nothing_on_path")
def test_without_a_compiler_a_run_trains_and_a_long_one_says_what_to_install():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trains("traced")
    said = "not as machine code: there is no C compiler (cc, gcc, clang): pip install"
    assert said in carpool.plan(jobs(epochs=100), device="cpu").groups[0].reason
    assert "machine code" not in carpool.plan(jobs(), device="cpu").groups[0].reason
    with pytest.raises(FusionError, match="there is no C compiler"):
        train(compile="resident")


def test_a_compiler_that_is_named_wrongly_is_told_in_the_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert_trains("traced")
    reason = carpool.plan(jobs(epochs=100), device="cpu").groups[0].reason
    assert "not as machine code: /nowhere/cc" in reason


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "echo 'program.c:1: error: no' >&2; exit 1",
            r"fake 1\.0 ended with code 1 \(program\.c:1: error: no",
        ),
        ("kill -9 $$", r"fake 1\.0 was ended by SIGKILL"),
        ("exec /bin/sleep 1000", r"fake 1\.0 did not end within 0\.2 s"),
        ("echo garbage > program.so", r"what fake 1\.0 made cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_is_told_once(
    compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, body: str, why: str
):
    monkeypatch.setattr(compilers, "MOST_S", 0.2)
    compiler(body)
    with pytest.warns(UserWarning, match=f"no machine code, so steps run as they were traced.*{why}") as told:
        assert_trains("traced")
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trains("traced")
    with pytest.raises(FusionError, match=why):
        train(compile="resident")


# The cache


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_on_a_full_or_read_only_disk_machine_code_runs_and_is_not_kept(
    number: int, untried: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(kept, "write_whole", refuses)
    monkeypatch.setattr(cache, "write_whole", refuses)
    assert_trains("resident")
    assert programs_kept(untried) == []


def test_a_cache_that_others_may_write_is_told_once_and_not_used(untried: Path):
    untried.chmod(0o777)
    with pytest.warns(UserWarning, match="is not used: ") as told:
        assert_trains("resident")
    assert len(told) == 1
    assert programs_kept(untried) == []


@AS_ROOT
def test_a_folder_of_another_user_is_not_used(untried: Path):
    (untried / "machine").mkdir(mode=0o700)
    os.chown(untried / "machine", 12345, 12345)
    assert_trains("resident")
    assert programs_kept(untried) == []


@pytest.mark.parametrize("change", ["cut", "exchanged"])
def test_files_that_are_not_what_was_kept_are_made_anew(change: str, untried: Path):
    train()
    files = programs_kept(untried)
    assert len(files) > 1
    held = [file.read_bytes() for file in files]
    for place, file in enumerate(files):
        file.unlink()  # what is loaded stays as it is
        file.write_bytes(held[place][:-100] if change == "cut" else held[place - 1])
    machine._desk.cache_clear()
    assert_trains("resident")
    assert [file.read_bytes() for file in programs_kept(untried)] == held


# Processors


def test_a_processor_without_avx2_has_code_that_it_can_run(monkeypatch: pytest.MonkeyPatch):
    here = processor.processor()
    old = replace(here, flags=here.flags - {"avx", "avx2", "fma"})
    asked: list[tuple[str, ...]] = []
    compile_in = compilers.compile_in

    def noted(folder: Path, source: str, by: machine.Compiler, flags: tuple[str, ...]) -> Path:
        asked.append(flags)
        return compile_in(folder, source, by, flags)

    monkeypatch.setattr(machine, "processor", lambda: old)
    monkeypatch.setattr(compilers, "compile_in", noted)
    assert_trains("resident")
    assert asked
    assert not any(flag.startswith(("-mavx", "-mfma")) for flags in asked for flag in flags)
