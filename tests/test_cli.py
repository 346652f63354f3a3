"""The command line, as its users meet it: output, errors in one line, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from carpool import Results, load, machine, recall, saving
from carpool.cli import app
from carpool.planning.trials import Trial
from patience import PATIENCE_S

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
STREAMED = SWEEP.replace(
    "data=(x, y)", "data=torch.utils.data.DataLoader([*zip(x, y)], batch_size=8)"
).replace("batch_size=8,\n", "\n")
JAX = """
import jax.numpy as jnp
import numpy as np
import optax
import carpool
from carpool.jax import Model

x = np.ones((8, 2), np.float32)


def job(seed):
    return carpool.Job(
        Model({"w": jnp.ones(2)}, lambda p, x: x @ p["w"]), (x, x[:, 0]), batch_size=4, seed=seed,
        loss=lambda p, t: ((p - t) ** 2).mean(), optimizer=optax.sgd(0.1),
    )


jobs = carpool.grid(job, seed=[0, 1])
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


SORTING = """
import torch
import carpool

x = torch.ones(8, 2)


def sorting(prediction, target):
    return prediction.sort(-1).values[:, 0].mean()


def job(loss, size, name):
    return carpool.Job(
        torch.nn.Linear(2, size), (x, x), name=name, loss=loss, optimizer=torch.optim.SGD, batch_size=4
    )


mse = torch.nn.functional.mse_loss
jobs = [job(mse, 2, "a"), job(mse, 2, "b"), job(sorting, 3, "c"), job(sorting, 3, "d"), job(mse, 1, "alone")]
"""


def test_plan_shows_the_code_of_each_fused_group_or_why_there_is_none(write: Callable[[str], str]) -> None:
    file = write(SORTING)
    plain, shown = (carpool("plan", file, "--device", "cpu", *options) for options in ([], ["--show-code"]))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[1:8] == plain.stdout.splitlines()[1:8]  # the first has what is free now
    _, first, second = re.split(r"^group \d$", shown.stdout, flags=re.MULTILINE)
    assert first.startswith("\n/* one member's training step, on a batch of 4 */\n#include <math.h>")
    assert "void member(Run *R, i8 row, char *A) {" in first
    assert second.strip() == "/* none: aten.sort.default has no loops */"


def test_code_is_shown_where_nothing_could_compile_it(
    write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "unavailable", lambda: "there is no C compiler")
    assert (
        "void member(Run *R, i8 row, char *A)"
        in carpool("plan", write(SWEEP), "--device", "cpu", "--show-code").stdout
    )


def test_a_file_without_fused_groups_has_no_code_to_show(write: Callable[[str], str]) -> None:
    options = ("--device", "cpu", "--strategy", "interleaved", "--show-code")
    result = carpool("plan", write(SWEEP), *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("no group is fused: there is no machine code to show\n")


def test_a_stream_and_another_framework_say_why_there_is_no_code(write: Callable[[str], str]) -> None:
    streamed = carpool("plan", write(STREAMED), "--device", "cpu", "--show-code")
    assert "/* none: batches of a stream do not lie" in streamed.stdout, streamed.output
    jax = carpool("plan", write(JAX), "--device", "cpu", "--strategy", "fused", "--show-code")
    assert jax.stdout.endswith("group 0\n/* none: jax makes its own programs */\n"), jax.output


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
    assert lines[0].split() == ["name", "outcome", "steps", "epoch", "loss"]
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


DYING = (
    SWEEP
    + """
class Late:
    def __init__(self):
        self.epochs = 0

    def __len__(self):
        return 1

    def __iter__(self):
        self.epochs += 1
        yield x[:8], y[:8]
        if self.epochs == 3:
            raise OSError("the share is gone")


def jobs():
    source = Late()
    return [
        carpool.Job(torch.nn.Linear(3, 1), source, name=f"j{i}", loss=torch.nn.functional.mse_loss,
                    optimizer=torch.optim.SGD, epochs=9)
        for i in range(2)
    ]
"""
)


def test_what_there_is_is_saved_when_every_job_failed(write: Callable[[str], str], tmp_path: Path) -> None:
    """A shared source died late: the table is shown, histories and weights are saved, the code is 1."""
    result = carpool("train", write(DYING), "--device", "cpu", "--save", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert isinstance(result.exception, OSError)  # with its traceback
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:3]] == [
        ["j0", "failed"],
        ["j1", "failed"],
    ]
    read = load(tmp_path / "out")
    assert [len(one.history["loss"]) for one in read] == [2, 2]
    assert all(one.weights.keys() == {"weight", "bias"} for one in read)


@pytest.mark.parametrize("folder", ["taken", "taken/below", "theirs"])
def test_the_folder_is_checked_before_training(
    write: Callable[[str], str], tmp_path: Path, folder: str
) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "results.json").write_text("[]")
    file = write('raise SystemExit("it was run")')
    result = carpool("train", file, "--save", str(tmp_path / folder))
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(tmp_path / folder) in result.stderr
    assert "it was run" not in result.stderr


def test_a_save_that_fails_goes_to_a_temporary_folder(
    write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    written = saving._replace

    def replace(results: Results, folder: Path) -> None:
        if folder == tmp_path / "out":
            raise OSError(28, "No space left on device")
        written(results, folder)

    monkeypatch.setattr(saving, "_replace", replace)
    result = carpool("train", write(SWEEP), "--device", "cpu", "--save", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "No space left on device" in result.stderr
    (spare,) = [path for path in (tmp_path / "spare").iterdir() if path.name.startswith("carpool-results-")]
    assert f"saved in {spare}, not in {tmp_path / 'out'}" in result.stdout
    assert len(load(spare)) == 2


def test_a_reader_that_goes_away_costs_no_save(write: Callable[[str], str], tmp_path: Path) -> None:
    """Standard output and standard error are pipes that nobody reads."""
    read, written = os.pipe()
    os.close(read)
    command = [
        sys.executable,
        "-m",
        "carpool",
        "train",
        write(SWEEP),
        "--device",
        "cpu",
        "--save",
        str(tmp_path / "out"),
    ]
    subprocess.run(command, stdout=written, stderr=written, timeout=PATIENCE_S)
    os.close(written)
    assert [result.outcome.word for result in load(tmp_path / "out")] == ["completed", "completed"]


METRIC = SWEEP.replace("batch_size=8", 'metrics={"elbo": lambda p, t: -((p - t) ** 2).mean()}, batch_size=8')


def test_the_table_is_sorted_by_a_metric_and_its_mode(write: Callable[[str], str]) -> None:
    """A metric of unknown direction needs --mode, before anything runs."""
    file = write(METRIC)
    refused = carpool("train", file, "--device", "cpu", "--sort", "elbo")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "'elbo'" in refused.stderr
    assert "jobs in" not in refused.stderr
    assert carpool("train", file, "--device", "cpu", "--mode", "max").exit_code == 2
    names = {}
    for mode in ("max", "min"):
        shown = carpool("train", file, "--device", "cpu", "--sort", "elbo", "--mode", mode)
        assert shown.exit_code == 0, shown.output
        names[mode] = [line.split()[0] for line in shown.stdout.splitlines()[1:]]
    assert names["max"] == names["min"][::-1]
    unsorted = carpool("train", file, "--device", "cpu", "--sort", "val_loss")
    assert "no job has the metric 'val_loss'" in unsorted.stderr
    assert len(unsorted.stdout.splitlines()) == 3


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
