"""Ctrl-C while planning: an import is finished or not begun, and afterwards everything works as before."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import carpool
from carpool import adapters
from carpool.executors.interrupt import Pause, WholeImports
from patience import PATIENCE_S

X, Y = torch.ones(8, 2), torch.ones(8, 1)
PART = "half_part"
WHOLE = "half_whole"


def rings(times: int) -> str:
    """A module that Ctrl-C comes in the middle of."""
    return "\n".join(
        ["import signal", f"import {PART}", *["signal.raise_signal(signal.SIGINT)"] * times, "end = 1"]
    )


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Modules that nobody has imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{PART}.py").write_text("end = 1\n")
    (tmp_path / f"{WHOLE}.py").write_text(rings(1))
    yield
    for name in (PART, WHOLE):
        sys.modules.pop(name, None)


def is_whole() -> bool:
    return hasattr(sys.modules.get(WHOLE, ModuleType("")), "end")


def importing() -> nn.Module:
    import half_whole  # type: ignore[import-not-found]  # noqa: F401

    return nn.Linear(2, 1)


def jobs(model: Any) -> list[carpool.Job]:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return [
        carpool.Job(model, (X, Y), loss=nn.functional.mse_loss, optimizer=sgd, seed=seed, name=str(seed))
        for seed in range(3)
    ]


def test_without_help_a_broken_import_leaves_a_part_behind():
    """What the tests below are about."""
    with pytest.raises(KeyboardInterrupt):
        importing()
    assert WHOLE not in sys.modules
    assert PART in sys.modules


def test_an_import_is_finished_and_the_interruption_comes_after_it():
    with pytest.raises(KeyboardInterrupt), WholeImports():
        importing()
    assert is_whole()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_however_often_it_is_asked_for(times: int, tmp_path: Path):
    (tmp_path / f"{WHOLE}.py").write_text(rings(times))
    with Pause() as pause:
        importing()
        assert is_whole()
        with pytest.raises(KeyboardInterrupt):
            pause.check()


def test_elsewhere_the_second_is_raised_at_once():
    with Pause():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_comes_after_the_last_look_is_for_whoever_is_outside():
    with pytest.raises(KeyboardInterrupt), Pause():
        signal.raise_signal(signal.SIGINT)


def test_an_adapter_is_imported_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(adapters.TABLE, "half", f"{WHOLE}:end")
    with pytest.raises(KeyboardInterrupt):
        adapters.load("half")
    assert is_whole()
    assert adapters.load("half") == 1


def test_while_jobs_are_built_and_planned_nothing_breaks():
    with pytest.raises(carpool.Interrupted) as caught:
        carpool.train(jobs(importing), device="cpu", reporters=[])
    assert [result.outcome for result in caught.value.results] == [carpool.Outcome.INTERRUPTED] * 3
    assert is_whole()
    results = carpool.train(jobs(importing), device="cpu", reporters=[])
    assert [result.strategy for result in results] == ["fused"] * 3


def test_a_plan_is_given_up_between_two_jobs():
    with pytest.raises(KeyboardInterrupt):
        carpool.plan(jobs(importing), device="cpu")
    assert is_whole()
    assert len(carpool.plan(jobs(importing), device="cpu").groups) == 1


PROGRAM = """
import signal, sys
from importlib.abc import MetaPathFinder
import numpy as np
import carpool

class Ring(MetaPathFinder):
    rung = 0
    def find_spec(self, name, path, target=None):
        if name == {inside!r} and not Ring.rung:
            Ring.rung += 1
            signal.raise_signal(signal.SIGINT)

def jobs():
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    same = dict(loss=loss, optimizer=sgd)
    return [carpool.Job("nets:net", (x, y), name=str(i), seed=i, **same) for i in range(3)]

def loss(prediction, target):
    return ((prediction - target) ** 2).mean()

def sgd(parameters):
    import torch
    return torch.optim.SGD(parameters, lr=0.1)

sys.meta_path.insert(0, Ring())
try:
    carpool.train(jobs(), device="cpu", reporters=[])
    print("went on")
except carpool.Interrupted as stopped:
    print(Ring.rung, [result.outcome.word for result in stopped.results])
print(sorted({{result.strategy for result in carpool.train(jobs(), device="cpu", reporters=[])}}))
"""
NETS = {
    "torch": ("import torch\n\ndef net():\n    return torch.nn.Linear(2, 1)\n", "torch.nn.functional"),
    "our own adapter": (
        "import torch\n\ndef net():\n    return torch.nn.Linear(2, 1)\n",
        "carpool.adapters.torch.fused",
    ),
}


@pytest.mark.parametrize("where", NETS)
def test_a_framework_whose_import_ctrl_c_came_in_works_afterwards(where: str, tmp_path: Path):
    nets, inside = NETS[where]
    (tmp_path / "nets.py").write_text(nets)
    program = PROGRAM.format(inside=inside)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines() == [f"1 {['interrupted'] * 3}", "['fused']"], done.stderr
