"""CUDA MPS for those who share a GPU between processes: started for them, stopped with us, and a daemon of theirs left alone.

Without MPS the processes on a GPU take turns; with it their kernels run at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from carpool.environment import mps_runs
from carpool.errors import OptionError, sentence
from carpool.process.child import Child

CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_USUAL_PIPES = "/tmp/nvidia-mps"  # NVIDIA's own default
_START_S = 10.0
_LOOK_S = 0.02
_QUIT_S = 5.0


@dataclass(frozen=True)
class Service:
    """Whether processes share the GPU through MPS, why or why not, and what their environment needs for it."""

    on: bool
    story: str
    variables: Mapping[str, str] = field(default_factory=dict)


class _Daemon:
    """A control daemon of our own in the foreground, in a folder of its own."""

    def __init__(self, control: str) -> None:
        self._control = control
        self._folder = tempfile.TemporaryDirectory(prefix="carpool-mps-")
        pipes, logs = Path(self._folder.name, "pipe"), Path(self._folder.name, "log")
        pipes.mkdir()
        logs.mkdir()
        self.variables = {_PIPES: str(pipes), _LOGS: str(logs)}
        self._child = Child([control, "-f"], env=self._environment(), stdout=subprocess.DEVNULL)

    def begun(self) -> bool:
        """Waits until clients can reach it; False when it ended instead, or takes too long."""
        end = time.monotonic() + _START_S
        signs = [Path(self.variables[_PIPES], name) for name in ("control", f"{CONTROL}.pid")]
        while not any(sign.exists() for sign in signs):
            if self._child.wait(_LOOK_S) is not None or time.monotonic() > end:
                return False
        return True

    def fault(self) -> str:
        """Why it did not begin, in its own words where it has any."""
        log = Path(self.variables[_LOGS], "control.log")
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        code = self._child.poll()
        ended = f"does not answer after {_START_S:.0f} s" if code is None else f"ended with code {code}"
        return f"{CONTROL} {ended}" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        """Asks it to quit, so that its servers let go of the GPU, then makes sure of it."""
        if self._child.poll() is None:
            with tempfile.TemporaryFile() as order:
                order.write(b"quit\n")
                order.seek(0)
                null = subprocess.DEVNULL
                with Child(
                    [self._control], env=self._environment(), stdin=order, stdout=null, stderr=null
                ) as asking:
                    asking.wait(_QUIT_S)
            self._child.wait(_QUIT_S)
        self._child.stop()
        self._child.close()
        self._folder.cleanup()

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables}


_lock = threading.Lock()
_daemon: _Daemon | None = None
_users = 0


@contextmanager
def service() -> Iterator[Service]:
    """MPS while it is open. Those who open it at the same time share one daemon; the last one stops it."""
    global _users
    with _lock:
        found = _found()
        ours = _daemon is not None
        _users += ours
    try:
        yield found
    finally:
        if ours:
            _leave()


def thread_share(share: float) -> dict[str, str]:
    """The environment of an MPS client that may use this share of the GPU's processors.

    >>> thread_share(0.25)
    {'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE': '25'}
    """
    if not 0 < share <= 1:
        raise OptionError(sentence("a share above 0 and at most 1", repr(share), "pass share=0.25, say"))
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share * 100:.4g}"}


def _found() -> Service:
    global _daemon
    if _daemon is not None:
        return Service(True, "MPS, started before", _daemon.variables)
    pipes = os.environ.get(_PIPES)
    if mps_runs(Path(pipes or _USUAL_PIPES)):
        return Service(True, "MPS, which is running already", {_PIPES: pipes} if pipes else {})
    if (control := shutil.which(CONTROL)) is None:
        return Service(False, f"no MPS: {CONTROL} is not on the PATH")
    made = _Daemon(control)
    if not made.begun():
        fault = made.fault()
        made.close()
        return Service(False, f"no MPS: {fault}")
    _daemon = made
    return Service(True, "MPS, started for this run", made.variables)


def _leave() -> None:
    global _daemon, _users
    with _lock:
        _users -= 1
        if _users == 0 and _daemon is not None:
            done, _daemon = _daemon, None
            done.close()
