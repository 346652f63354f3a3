"""Jobs from a file: what is accepted, and what each mistake is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from carpool.errors import FileError, JobError
from carpool.jobfile import load_jobs

JOB = "carpool.Job(dict, ([1.0], [2.0]), loss=max, name={name!r})"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> Path:
        path = tmp_path / "sweep.py"
        path.write_text("import carpool\n" + text)
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        f"jobs = [{JOB.format(name='a')}, {JOB.format(name='b')}]",
        f"def jobs():\n    return ({JOB.format(name='a')}, {JOB.format(name='b')})",
        f"def jobs():\n    yield {JOB.format(name='a')}\n    yield {JOB.format(name='b')}",
        "jobs = carpool.grid(lambda n: carpool.Job(dict, ([1.0], [2.0]), loss=max, name=n), n=['a', 'b'])",
    ],
    ids=["list", "function", "generator", "grid"],
)
def test_jobs_are_loaded(write: Write, text: str) -> None:
    assert [job.name for job in load_jobs(write(text))] == ["a", "b"]


def test_files_beside_it_can_be_imported(write: Write) -> None:
    path = write(
        "from beside_the_sweep import NAME\n"
        + "jobs = [carpool.Job(dict, ([1.0], [2.0]), loss=max, name=NAME)]"
    )
    (path.parent / "beside_the_sweep.py").write_text("NAME = 'neighbour'\n")
    assert load_jobs(path)[0].name == "neighbour"


def test_a_file_named_like_a_module_does_not_replace_it(write: Write) -> None:
    path = write(f"jobs = [{JOB.format(name='a')}]")
    clash = path.rename(path.with_name("json.py"))
    load_jobs(clash)
    import json

    assert json.loads("1") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jobs = [", "SyntaxError: '[' was never closed (sweep.py, line 2)"),
        ("x = 1\n1 / 0", "ZeroDivisionError: division by zero (line 3)"),
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here' (line 2)"),
        ("raise SystemExit(3)", "SystemExit: exit code 3 (line 2)"),
        ("def jobs():\n    return [1 / 0]", "ZeroDivisionError: division by zero (line 3)"),
        ("job = 1", "to name its jobs `jobs`. Received: only carpool, job. Remedy: write `jobs"),
        ("jobs = 3", "to be a sequence of carpool.Job. Received: a value of type int"),
        ("jobs = 'abc'", "Received: a value of type str"),
        ("def jobs():\n    pass", "Received: None"),
        (f"jobs = {JOB.format(name='a')}", "Received: a value of type Job"),
        (f"jobs = [{JOB.format(name='a')}, 'b']", "Received: a value of type str at position 1"),
        ("jobs = []", "at least one job"),
    ],
)
def test_a_mistake_in_the_file_is_said(write: Write, text: str, said: str) -> None:
    with pytest.raises(FileError) as caught:
        load_jobs(write(text))
    assert said in str(caught.value)
    assert "Remedy: " in str(caught.value)


def test_a_wrong_job_keeps_its_own_error(write: Write) -> None:
    with pytest.raises(JobError, match="batch_size of at least 1"):
        load_jobs(write("jobs = [carpool.Job(dict, ([1.0], [2.0]), loss=max, batch_size=0)]"))


def test_a_path_that_is_no_python_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    for name, said in (
        ("absent.py", "does not exist"),
        (".", "is a folder"),
        ("notes.txt", "a Python file (.py)"),
    ):
        with pytest.raises(FileError) as caught:
            load_jobs(tmp_path / name)
        assert said in str(caught.value)
