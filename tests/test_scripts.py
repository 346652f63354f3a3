"""Scripts from the words of a command line, and what became of them as a table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from carpool.errors import FileError, OptionError
from carpool.scripts import Ended, Script, check, hint, parse, table


def test_scripts_stand_between_colons():
    first, second, third = parse(["a.py", "--lr", "0.1", ":", "-m", "pack.b", "-m", "3", ":", "./run", "x:y"])
    assert first == Script("a", "a.py", ("--lr", "0.1"))
    assert second == Script("pack.b", "pack.b", ("-m", "3"), is_module=True)
    assert third == Script("run", "./run", ("x:y",))


def test_python_runs_with_this_python_and_programs_as_they_are():
    commands = [
        script.command for script in parse(["a/b.py", "1", ":", "-m", "pack.b", "2", ":", "make", "3"])
    ]
    assert commands == [
        (sys.executable, "a/b.py", "1"),
        (sys.executable, "-m", "pack.b", "2"),
        ("make", "3"),
    ]


def test_a_grid_appends_each_cell_the_last_axis_fastest():
    made = parse(["train.py", "--epochs", "3"], ["lr=0.1,0.01", "seed=0,1"])
    assert [script.name for script in made] == [
        "train[lr=0.1,seed=0]",
        "train[lr=0.1,seed=1]",
        "train[lr=0.01,seed=0]",
        "train[lr=0.01,seed=1]",
    ]
    assert made[2].arguments == ("--epochs", "3", "--lr", "0.01", "--seed", "0")


def test_a_grid_is_for_every_script():
    assert [script.name for script in parse(["a.py", ":", "b.py"], ["x=1,2"])] == [
        "a[x=1]",
        "a[x=2]",
        "b[x=1]",
        "b[x=2]",
    ]


def test_every_script_has_a_name_and_a_file_of_its_own():
    made = parse(["train.py", ":", "x/train.py", ":", "train-2.py", ":", "train.py"])
    assert [script.name for script in made] == ["train", "train-2", "train-2-2", "train-3"]
    slashes = parse(["a.py"], ["path=x/y,x_y"])
    assert [script.file_name for script in slashes] == ["a[path=x_y]", "a[path=x_y]-2"]


def test_a_long_name_is_a_short_file_of_its_own():
    """Names of any length and alphabet have distinct names as files, which file systems take."""
    values = ["a" * 300, "a" * 299 + "b", "é" * 300, "/" * 300, "\x1b[31m" * 50, "\udcff" * 200]
    names = [script.file_name for script in parse(["a.py"], [f"x={','.join(values)}"])]
    assert len(set(names)) == len(values)
    assert all(len(name.encode()) <= 130 and "/" not in name and name.isprintable() for name in names)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("a.py b.py", "a.py : b.py"),
        ("a.py --lr 0.1 b.py --lr 0.2 : c.py", "a.py --lr 0.1 : b.py --lr 0.2 : c.py"),
        ("a.py :b.py", "a.py : b.py"),
        ("a.py --lr 0.1 : b.py", None),
        ("a.py no.py", None),
        ("python b.py", None),
        ("-m cProfile b.py", None),
    ],
)
def test_a_script_among_arguments_gets_a_hint(
    words: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        (tmp_path / f"{name}.py").touch()
    assert hint(words.split()) == meant


@pytest.mark.parametrize("words", ["", ":", "a.py :", ": a.py", "a.py : -m"])
def test_a_place_without_a_script_is_refused(words: str):
    with pytest.raises(OptionError, match=r"^Expected a (script|module)"):
        parse(words.split())


@pytest.mark.parametrize("axes", [["lr"], ["=1"], ["lr="], ["lr=1,,2"], ["lr=1", "lr=2"], ["--lr=1"]])
def test_an_odd_axis_is_refused(axes: list[str]):
    with pytest.raises(OptionError, match=r"Expected --grid NAME=VALUE"):
        parse(["a.py"], axes)


def test_what_is_there_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("raise SystemExit('looking must not run it')")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('looking must not run it')")
    (tmp_path / "pack" / "b.py").touch()
    check(
        parse(["a.py", ":", "-m", "pack.b", ":", "-m", "json.tool", ":", "-m", "a", ":", "sh", "-c", "true"])
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("no.py", "no.py, which does not exist"),
        ("-m pack.no", "-m pack.no"),
        ("-m no.such", "-m no.such"),
        ("no-such-program", "no-such-program, which cannot be run"),
        ("./plain", r"chmod \+x ./plain"),
        (".", "cannot be run"),
    ],
)
def test_what_is_not_there_is_refused(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    with pytest.raises(FileError, match=said):
        check(parse(["sh", ":", *words.split()]))


def test_the_table_says_how_each_ended():
    ended = [
        Ended("fine", 0, 2.0, 5 << 20),
        Ended("crashed", -11, 0.3, 1 << 30),
        Ended("odd", -40),
        Ended("refused", 3),
        Ended("late", None, story="not started"),
        Ended("polite", 0, 1.0, story="interrupted"),
        Ended("cut", 0, 1.0, lost="No space left on device"),
    ]
    rows = [line.split("  ") for line in table(ended).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows[1:]]
    assert cells == [
        ["fine", "completed", "0", "2.0", "5 MiB"],
        ["crashed", "failed", "SIGSEGV", "0.3", "1.0 GiB"],
        ["odd", "failed", "signal 40", "0.0", "-"],
        ["refused", "failed", "3", "0.0", "-"],
        ["late", "not started", "-", "0.0", "-"],
        ["polite", "interrupted", "0", "1.0", "-"],
        ["cut", "completed, its log is not whole: No space left on device", "0", "1.0", "-"],
    ]
    assert [each.is_completed for each in ended] == [True, False, False, False, False, False, True]
