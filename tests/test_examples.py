"""The examples run, are short, and print what they are about."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from carpool.cli import app
from patience import PATIENCE_S

FOLDER = Path(__file__).parents[1] / "examples"
SHOWS = {
    "sweep.py": "the best model reads the first five as",
    "kfold.py": "accuracy over 10 folds",
    "ensemble.py": "of the ensemble",
    "own_step.py": "guessed",
    "gan.py": "making_loss",
    "lion.py": "lr=0.1,decay=0.1",
    "loaders.py": "queue, wider     completed",
    "keras_models.py": "evaluated again",
    "own_loop.py": "of the test images read rightly",
    "jax_sweep.py": "val_loss",
    "jax_population.py": "of the better 8 together",
    "tensorflow_graphs.py": "of unseen digits read rightly",
}
APART = {"tensorflow_modules.py": "together as alone"}
"""Those that run in a process of their own, with Keras on TensorFlow."""
JOBS_FILE = "jobs_file.py"
MOST_LINES = 52


def test_every_example_is_run_here():
    assert {path.name for path in FOLDER.glob("*.py")} == {*SHOWS, *APART, JOBS_FILE}


@pytest.mark.parametrize("name", [*SHOWS, *APART, JOBS_FILE])
def test_an_example_is_short(name: str):
    assert len((FOLDER / name).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", SHOWS)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert SHOWS[name] in capsys.readouterr().out


@pytest.mark.slow  # TensorFlow alone takes most of it; tests/test_tensorflow_modules.py and tests/test_sources.py run such jobs in the fast suite
@pytest.mark.parametrize("name", APART)
def test_an_example_runs_in_a_process_of_its_own(name: str):
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(FOLDER / name)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert APART[name] in ended.stdout


@pytest.mark.parametrize("command", ["plan", "train"])
def test_the_jobs_file_runs(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # a jobs file's folder stays on it
    done = CliRunner().invoke(app, [command, str(FOLDER / JOBS_FILE)])
    assert done.exit_code == 0, done.output
    assert "hidden=32,lr=0.1" in done.output
