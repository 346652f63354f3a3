"""The examples run, are short, and print what they are about."""

import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from carpool.cli import app

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
JOBS_FILE = "jobs_file.py"
MOST_LINES = 52


def test_every_example_is_run_here():
    assert {path.name for path in FOLDER.glob("*.py")} == {*SHOWS, JOBS_FILE}


@pytest.mark.parametrize("name", [*SHOWS, JOBS_FILE])
def test_an_example_is_short(name: str):
    assert len((FOLDER / name).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", SHOWS)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert SHOWS[name] in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "train"])
def test_the_jobs_file_runs(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # a jobs file's folder stays on it
    done = CliRunner().invoke(app, [command, str(FOLDER / JOBS_FILE)])
    assert done.exit_code == 0, done.output
    assert "hidden=32,lr=0.1" in done.output
