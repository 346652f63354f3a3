"""MPS with a control program of our own making: started once, shared, stopped, never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from carpool.errors import OptionError
from carpool.process import mps
from carpool.testing.processes import gone

CONTROL = """\
#!{python}
import os, signal, sys, time
pipes, logs, notes = os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"], {notes!r}
def note(text):
    with open(notes, "a") as file: file.write(text + "\\n")
pid = os.path.join(pipes, "nvidia-cuda-mps-control.pid")
if "-f" not in sys.argv:
    note("order " + sys.stdin.read().strip())
    os.kill(int(open(pid).read()), signal.SIGUSR1)
    sys.exit()
if {broken}:
    open(os.path.join(logs, "control.log"), "w").write("first\\nno GPU to serve\\n")
    sys.exit(3)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
note(f"began {{os.getpid()}}")
open(pid + ".new", "w").write(str(os.getpid()))
os.rename(pid + ".new", pid)
while True: time.sleep(600)
"""


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def control(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a control program on the PATH, and no daemon of the user's in the usual place."""

    def put(broken: bool = False) -> None:
        program = tmp_path / "bin" / mps.CONTROL
        program.parent.mkdir()
        program.write_text(CONTROL.format(python=sys.executable, notes=str(notes), broken=broken))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)

    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(mps, "_USUAL_PIPES", str(tmp_path / "nobody"))
    return put


def noted(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_it_runs_while_it_is_open_and_is_asked_to_quit(control, notes: Path):
    control()
    with mps.service() as service:
        assert service.on
        assert service.story == "MPS, started for this run"
        assert set(service.variables) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        pipes = Path(service.variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipes.is_dir()
        pid = int(noted(notes)[0].split()[1])
        assert alive(pid)
    assert noted(notes)[1:] == ["order quit"]
    assert gone(pid)
    assert not pipes.parent.exists()


def test_those_who_open_it_together_share_one(control, notes: Path):
    control()
    with mps.service() as first:
        with mps.service() as second:
            assert second.variables == first.variables
        assert len(noted(notes)) == 1, "the first one still uses it"
    assert noted(notes)[1:] == ["order quit"]
    with mps.service() as again:
        assert again.variables != first.variables


@pytest.mark.parametrize("own_folder", [True, False])
def test_a_daemon_of_the_users_is_used_and_left_alone(
    control, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_folder: bool
):
    control()
    pipes = tmp_path / "theirs"
    pipes.mkdir()
    (pipes / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    if own_folder:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    else:
        monkeypatch.setattr(mps, "_USUAL_PIPES", str(pipes))
    with mps.service() as service:
        assert service.on
        assert "already" in service.story
        assert service.variables == ({"CUDA_MPS_PIPE_DIRECTORY": str(pipes)} if own_folder else {})
    assert noted(notes) == []


def test_without_the_program_nothing_happens_and_it_says_why(control, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with mps.service() as service:
        assert service == mps.Service(False, "no MPS: nvidia-cuda-mps-control is not on the PATH")


def test_a_daemon_that_ends_at_once_says_why(control):
    control(broken=True)
    with mps.service() as service:
        assert service == mps.Service(
            False, "no MPS: nvidia-cuda-mps-control ended with code 3: no GPU to serve"
        )


def test_it_dies_with_us(control, notes: Path):
    control()
    code = """
        import sys, time
        from carpool.process import mps
        mps._USUAL_PIPES = "/nowhere"
        with mps.service() as service:
            print(service.on, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as us:
        assert us.stdout is not None
        assert us.stdout.readline() == b"True\n"
        pid = int(noted(notes)[0].split()[1])
        assert alive(pid)
        us.kill()
    assert gone(pid)


@pytest.mark.parametrize(
    ("share", "percentage"), [(1, "100"), (0.25, "25"), (1 / 3, "33.33"), (0.001, "0.1")]
)
def test_a_share_is_a_percentage(share: float, percentage: str):
    assert mps.thread_share(share) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage}


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan")])
def test_what_is_no_share_is_refused(share: float):
    with pytest.raises(OptionError, match="Expected a share above 0 and at most 1"):
        mps.thread_share(share)
