"""`carpool exec` as its users meet it: real processes, a real terminal, a real Ctrl-C."""

from __future__ import annotations

import os
import pty
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from carpool.cli import app
from carpool.memory import device
from carpool.memory.device import DeviceMemory
from carpool.process import mps
from carpool.testing.processes import gone, many_descriptors, may_open

GIB = 1 << 30


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a script that shows its arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show.py").write_text("import sys; print(*sys.argv[1:])\n")
    return tmp_path


def carpool(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["exec", *arguments])


def started(
    *arguments: str, stdout: int = subprocess.PIPE, before: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    source = str(Path(mps.__file__).parents[2])
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "carpool", "exec", *arguments]
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=env, preexec_fn=before)


def outcomes(result: Result) -> list[list[str]]:
    lines = result.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("script "))
    return [line.split()[:3] for line in lines[first + 1 :]]


def test_two_scripts_with_their_own_options():
    result = carpool("--logs", "out", "show.py", "--memory", "3", "-m", "--", ":", "show.py", "--help")
    assert result.exit_code == 0, result.output
    assert "show | --memory 3 -m --\n" in result.stdout
    assert "show-2 | --help\n" in result.stdout
    assert outcomes(result) == [["show", "completed", "0"], ["show-2", "completed", "0"]]
    assert result.stderr == "carpool: logs in out\n"
    assert Path("out", "show-2.log").read_text() == "--help\n"


def test_a_grid_runs_every_cell():
    result = carpool("--grid", "lr=0.1,0.01", "--grid", "seed=0,1", "--", "show.py", "--epochs", "3")
    assert result.exit_code == 0, result.output
    assert "show[lr=0.01,seed=1] | --epochs 3 --lr 0.01 --seed 1\n" in result.stdout
    assert len(outcomes(result)) == 4
    (folder,) = Path("carpool-logs").iterdir()
    assert result.stderr == f"carpool: logs in {folder}\n"
    assert {log.name for log in folder.iterdir()} == {
        f"show[lr={lr},seed={seed}].log" for lr in ("0.1", "0.01") for seed in (0, 1)
    }


@pytest.mark.parametrize("options", [[], ["--jobs", "1"], ["--jobs=1"], ["--no-mps"], ["--jobs", "1", "--"]])
def test_a_module_may_come_first(options: list[str]):
    result = carpool(*options, "-m", "show", "--jobs", "-m")
    assert result.exit_code == 0, result.output
    assert "show | --jobs -m\n" in result.stdout


def test_one_that_fails_makes_code_1_and_the_others_end():
    Path("bad.py").write_text("raise SystemExit(7)")
    result = carpool("bad.py", ":", "show.py", ":", "sh", "-c", "kill -SEGV $$")
    assert result.exit_code == 1
    assert outcomes(result) == [
        ["bad", "failed", "7"],
        ["show", "completed", "0"],
        ["sh", "failed", "SIGSEGV"],
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show.py", ":", "no.py"], "no.py, which does not exist"),
        (["--grid", "lr", "show.py"], "--grid NAME=VALUE"),
        (["--memory", "12 bananas", "show.py"], "12 bananas"),
        (["--memory", "9999TiB", "show.py"], "that are free on cpu"),
        (["--share", "2", "show.py"], "a share above 0"),
        (["show.py", ":"], "a script on each side"),
    ],
)
def test_misuse_is_one_line_and_code_2_and_nothing_runs(arguments: list[str], said: str, here: Path):
    result = carpool(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("carpool: Expected ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert [path.name for path in here.iterdir()] == ["show.py"]


def test_no_script_is_misuse():
    assert carpool().exit_code == 2
    assert carpool("--jobs", "0", "show.py").exit_code == 2


def test_a_share_without_mps_is_said(monkeypatch: pytest.MonkeyPatch):
    result = carpool("--share", "0.5", "--no-mps", "show.py")
    assert result.exit_code == 0
    assert "carpool: no MPS; --share has no effect without it\n" in result.stderr
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(mps, "_USUAL_PIPES", "/nowhere")
    assert (
        "carpool: no MPS: nvidia-cuda-mps-control is not on the PATH\n" in carpool("--mps", "show.py").stderr
    )


def test_with_a_gpu_mps_is_on_and_the_frameworks_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    gpu = DeviceMemory("H200", 80 * GIB, 70 * GIB)
    monkeypatch.setattr(device, "gpus", lambda: (gpu,))
    monkeypatch.setattr(device, "read", lambda name: gpu)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    (pipes / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    Path("env.py").write_text(f"import os; print(*(os.environ[name] for name in {names}))")
    result = carpool("--memory", "20GiB", "--share", "0.5", "env.py")
    assert result.exit_code == 0, result.output
    assert f"env | 0.237500 {pipes} 50\n" in result.stdout
    assert "carpool: MPS, which is running already\n" in result.stderr
    assert "MPS" not in carpool("--no-mps", "show.py").stderr


SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_ctrl_c_and_death_leave_nothing_running(number: signal.Signals, code: int):
    Path("sleeper.py").write_text(SLEEPER)
    with started("--jobs", "2", "sleeper.py", ":", "sleeper.py", ":", "show.py") as us:
        assert us.stdout is not None
        said = [us.stdout.readline().split() for _ in range(2)]
        assert sorted(line[0] for line in said) == [b"sleeper", b"sleeper-2"]
        pids = [int(word) for line in said for word in line[3:]]
        assert len(pids) == 4
        us.send_signal(number)
        rest = us.stdout.read().decode()
    assert us.returncode == code
    assert all(gone(pid) for pid in pids)
    if number == signal.SIGINT:
        rows = [line.split()[:3] for line in rest.splitlines()[1:]]
        assert rows == [
            ["sleeper", "interrupted", "SIGTERM"],
            ["sleeper-2", "interrupted", "SIGTERM"],
            ["show", "not", "started"],
        ]


WATCHER = """
import os, signal, time
from pathlib import Path
leash = os.getppid()
os.kill(leash, signal.SIGKILL)
while os.getppid() == leash: time.sleep(0.01)
print("and on")
"""


def test_a_killed_leash_ends_nobody():
    """A killed leash: its script goes on to its end, as do the others; how it ended is not known, and that is said."""
    Path("watcher.py").write_text(WATCHER)
    result = carpool("--logs", "out", "watcher.py", ":", "show.py", "x")
    assert result.exit_code == 1
    assert Path("out", "watcher.log").read_text() == "and on\n"
    assert "watcher  the process that watched it was killed, so how it ended is not known" in result.stdout
    assert "show     completed" in result.stdout


def _descriptors() -> None:
    many_descriptors()
    null = os.open(os.devnull, os.O_RDONLY)
    for number in range(3, 1203):
        os.dup2(null, number)


@pytest.mark.skipif(not may_open(1500), reason="this process may not open so many")
def test_more_descriptors_than_select_takes():
    """More than 1,024 open descriptors."""
    with started("show.py", "x", before=_descriptors) as us:
        assert us.stdout is not None
        assert us.stdout.readline() == b"show | x\n"
        us.stdout.read()
    assert us.returncode == 0


def test_on_a_terminal_names_are_coloured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = pty.openpty()
    with started("show.py", "1", stdout=theirs) as us:
        os.close(theirs)
        text = b""
        try:
            while data := os.read(ours, 4096):
                text += data
        except OSError:  # how a terminal says that its last writer is gone
            pass
    os.close(ours)
    assert us.returncode == 0
    assert b"\x1b[36mshow |\x1b[0m 1\r\n" in text


def test_a_reader_that_goes_away_does_not_end_the_scripts():
    Path("many.py").write_text("import sys\nfor n in range(20_000): print(n)\nopen('done', 'w').write('1')\n")
    with started("--logs", "out", "many.py") as us:
        assert us.stdout is not None
        us.stdout.readline()
        us.stdout.close()
        us.stdout = None
        assert us.stderr is not None
        *_, last = us.stderr.read().decode().splitlines()
    assert (us.returncode, last) == (1, "carpool: stdout took no more: Broken pipe; the output is in out")
    assert Path("done").exists()
    assert Path("out", "many.log").read_text().splitlines()[-1] == "19999"


@pytest.mark.parametrize(
    ("device", "why"),
    [("/dev/full", "No space left on device"), (None, "it is closed")],
    ids=["full", "closed"],
)
def test_a_full_or_closed_stdout_does_not_end_the_scripts(device: str | None, why: str):
    """Standard output that is full or closed: scripts go on, logs are whole, one line and the exit code say it."""
    Path("two.py").write_text("import time\nprint(1)\ntime.sleep(0.1)\nprint(2)\n")
    stdout = os.open(device or os.devnull, os.O_WRONLY)
    with started(
        "--logs",
        "out",
        "two.py",
        ":",
        "show.py",
        "x",
        stdout=stdout,
        before=None if device else _close_stdout,
    ) as us:
        os.close(stdout)
        assert us.stderr is not None
        first, *table, last = us.stderr.read().decode().splitlines()
    assert (us.returncode, first) == (1, "carpool: logs in out")
    assert last == f"carpool: stdout took no more: {why}; the output is in out"
    assert [line.split()[:2] for line in table[1:]] == [["two", "completed"], ["show", "completed"]]
    assert [Path("out", f"{name}.log").read_text() for name in ("two", "show")] == ["1\n2\n", "x\n"]


def _close_stdout() -> None:
    os.close(1)


def test_a_full_pipe_that_does_not_block_is_waited_for():
    """A pipe that does not block (EAGAIN) loses nothing and ends nobody."""
    Path("many.py").write_text("for n in range(20_000): print(n)\n")
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    room = select.poll()
    room.register(theirs, select.POLLOUT)
    with started("many.py", stdout=theirs) as us:
        while room.poll(0):  # until it is full
            time.sleep(0.01)
        os.close(theirs)
        with open(ours) as file:
            lines = file.read().splitlines()
    assert us.returncode == 0
    assert lines[:20_000] == [f"many | {n}" for n in range(20_000)]


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_full_log_disk_does_not_end_the_scripts():
    """A full log disk: all of the output is shown, what the disk takes is kept, one line and the exit code say it."""
    Path("many.py").write_text("for n in range(5_000): print(n)\n")
    with started("--logs", "out", "many.py", ":", "show.py", "x", before=_small_files) as us:
        assert us.stdout is not None
        lines = us.stdout.read().decode().splitlines()
    assert us.returncode == 1
    shown = [line.removeprefix("many | ") for line in lines if line.startswith("many | ")]
    assert [line for line in shown if not line.startswith("carpool")] == [str(n) for n in range(5_000)]
    assert shown.count("carpool: its log ends here: File too large") == 1
    assert lines[-2].startswith("many    completed, its log is not whole: File too large  0 ")
    assert lines[-1].startswith("show    completed  ")
    assert Path("out", "many.log").stat().st_size == 4096
    assert Path("out", "show.log").read_text() == "x\n"


def test_a_log_that_cannot_be_opened_does_not_end_the_script():
    Path("out", "show.log").mkdir(parents=True)
    result = carpool("--logs", "out", "show.py", "x")
    assert result.exit_code == 1
    assert "show | carpool: no log of it: " in result.stdout
    assert "show | x\n" in result.stdout


def test_a_log_is_never_written_through_a_link(here: Path):
    """What a link in the log folder leads to stays as it was."""
    (here / "precious").write_text("theirs")
    (here / "out").mkdir()
    (here / "out" / "show.log").symlink_to(here / "precious")
    assert carpool("--logs", "out", "show.py", "x").exit_code == 0
    assert (here / "precious").read_text() == "theirs"
    assert (here / "out" / "show.log").read_text() == "x\n"


def test_long_values_have_logs_of_their_own():
    """A value of 300 characters is no name of a file: it is shortened, and told from others like it."""
    long = "a" * 300
    result = carpool("--logs", "out", "--grid", f"x={long}b,{long}c", "--", "show.py")
    assert result.exit_code == 0, result.output
    assert sorted(log.read_text() for log in Path("out").iterdir()) == [f"--x {long}b\n", f"--x {long}c\n"]


def test_a_forgotten_colon_gets_a_hint_and_no_refusal():
    """A script among a script's arguments may be one: the line says what was perhaps meant, and it goes on."""
    Path("b.py").write_text("print('b')")
    result = carpool("--logs", "out", "show.py", "--lr", "0.1", "b.py")
    assert result.exit_code == 0
    assert "did you mean: carpool exec show.py --lr 0.1 : b.py\n" in result.stderr
    assert "show | --lr 0.1 b.py\n" in result.stdout
