"""The command line, as its users meet it: output, errors in one line, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from carpool import recall
from carpool.cli import app
from carpool.planning.trials import Trial

SWEEP = """
import torch
import carpool

generator = torch.Generator().manual_seed(0)
x = torch.randn(24, 3, generator=generator)
y = x.sum(1, keepdim=True)


def job(lr, hidden):
    return carpool.Job(
        lambda: torch.nn.Sequential(torch.nn.Linear(3, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1)),
        data=(x, y),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch_size=8,
        epochs=2,
    )


def jobs():
    return carpool.grid(job, lr=[0.1, 0.01], hidden=[4])
"""
FAILING = """
import torch
import carpool

x = torch.ones(4, 1)


def broken(prediction, target):
    raise RuntimeError("a loss of my own")


def job(loss, name):
    return carpool.Job(
        torch.nn.Linear(1, 1), (x, x), name=name, loss=loss, optimizer=torch.optim.SGD, batch_size=2
    )


jobs = [job(torch.nn.functional.mse_loss, "sound"), job(broken, "broken")]
"""


@pytest.fixture(autouse=True)
def _restore_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # a jobs file's folder stays on it


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "sweep.py").write_text(text)
        return str(tmp_path / "sweep.py")

    return write


def carpool(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("text", "said"),
    [("jobs = [", "SyntaxError"), ("x = 1", "to name its jobs `jobs`"), ("jobs = [3]", "at position 0")],
)
def test_a_bad_file_is_one_line_and_code_2(
    write: Callable[[str], str], command: str, text: str, said: str
) -> None:
    result = carpool(command, write(text))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("carpool: Expected ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


def test_a_missing_file_is_one_line_and_code_2() -> None:
    result = carpool("train", "no/such/file.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no/such/file.py, which does not exist" in result.stderr


@pytest.mark.parametrize("option", ["--strategy", "--device"])
def test_an_unknown_word_is_one_line_and_code_2(write: Callable[[str], str], option: str) -> None:
    result = carpool("plan", write(SWEEP), option, "sideways")
    assert result.exit_code == 2
    assert result.stderr.startswith("carpool: ")
    assert result.stderr.count("\n") == 1
    assert "'sideways'" in result.stderr


def test_plan_says_what_would_run_together(write: Callable[[str], str]) -> None:
    result = carpool("plan", write(SWEEP), "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 jobs in 1 group on cpu")
    assert "because 2 jobs of one structure" in result.stdout


@pytest.mark.usefixtures("trials")
def test_plan_measures_where_asked(write: Callable[[str], str]) -> None:
    assert "measured on this device" not in carpool("plan", write(SWEEP), "--device", "cpu").stdout
    result = carpool("plan", write(SWEEP), "--device", "cpu", "--measure")
    assert result.exit_code == 0, result.output
    assert "measured on this device: a step of 2 together takes" in result.stdout


def test_train_prints_a_table_and_saves(write: Callable[[str], str], tmp_path: Path) -> None:
    saved = tmp_path / "out"
    result = carpool("train", write(SWEEP), "--device", "cpu", "--save", str(saved), "--verify")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "outcome", "steps", "loss"]
    assert lines[1].split()[:3] == ["lr=0.1,hidden=4", "completed", "6"]
    assert lines[3] == f"saved in {saved}"
    assert [job["name"] for job in json.loads((saved / "results.json").read_text())["jobs"]] == [
        "lr=0.1,hidden=4",
        "lr=0.01,hidden=4",
    ]
    assert "2 jobs in 1 group on cpu: 2 fused; 12 steps" in result.stderr


def test_a_failed_job_is_shown_and_makes_code_1(write: Callable[[str], str]) -> None:
    result = carpool("train", write(FAILING), "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert "failed: broken: RuntimeError: a loss of my own" in result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        ["sound", "completed"],
        ["broken", "failed"],
    ]


def test_doctor_prints_a_table_or_one_object() -> None:
    assert "Python" in carpool("doctor").stdout
    findings = json.loads(carpool("doctor", "--json").stdout)["findings"]
    assert {"subject", "state", "text"} == set(findings[0])


def test_doctor_forgets_what_was_measured() -> None:
    recall.remember("a", Trial(8, 0.25, 0.125))
    assert "1 measurement(s) dropped" in carpool("doctor", "--forget").stderr
    assert recall.remembered("a") is None


def test_demo_prints_exactly_one_object() -> None:
    result = carpool("demo", "--jobs", "8", "--epochs", "2", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert (report["jobs"], report["groups"], report["epochs"], report["device"]) == (8, 4, 2, "cpu")
    assert report["alone_sampled_jobs"] == 4
    assert report["compared_steps"] == 90
    assert report["alone_s"] == pytest.approx(2 * report["alone_sampled_s"])
    assert report["speedup"] == pytest.approx(report["alone_s"] / report["together_s"])
    assert 0 <= report["compile_s"] <= report["together_s"]
    assert report["max_weight_difference"] <= 1e-4 * report["max_weight"]
    assert report["best"]["val_accuracy"] > 0.5


def test_demo_in_words() -> None:
    result = carpool("demo", "--jobs", "4", "--epochs", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for words in (
        "4 jobs in 4 groups on cpu",
        "val_accuracy",
        "one by one:",
        "speed-up:",
        "largest weight difference",
    ):
        assert words in result.stdout


def test_importing_the_command_line_imports_no_framework() -> None:
    code = "import sys, carpool.cli; sys.exit(', '.join({'torch', 'jax', 'keras', 'tensorflow'} & set(sys.modules)) or None)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_long_table_is_cut_to_the_best():
    from carpool.cli import _leaderboard
    from carpool.result import Outcome, Result, Results

    made = [Result(f"j{i}", Outcome.COMPLETED, history={"loss": [float(i)]}) for i in range(100)]
    text = _leaderboard(Results(made[::-1]))
    assert text.splitlines()[0] == "the best 30 by loss:"
    assert text.splitlines()[2].startswith("j0 ")
    assert text.splitlines()[-1] == "and 70 more; --save FOLDER keeps them all"
    assert "and" not in _leaderboard(Results(made[:30]))
