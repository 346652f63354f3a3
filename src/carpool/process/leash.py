"""The process between us and a command of ours: whatever happens to us, the command and all it started end.

Run by path with a bare interpreter (`python -I -S leash.py FD COMMAND...`), so it imports the standard library alone and starts in
some 40 ms. It does not share the command's interpreter: a command that hangs in C, or holds its lock, is still stopped.

The socket FD carries "t" (terminate) and "k" (kill) in, and lines of JSON out: {"pid": ...} once the command runs, {"code": ...} when it
has ended (negative: a signal), with the most memory that one of its processes had. When the other end closes, we are gone, and the command is killed.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05  # where there is no pidfd


def main(descriptor: int, command: list[str]) -> int:
    parent = socket.socket(fileno=descriptor)
    parent.set_inheritable(False)
    _adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command, process_group=0, close_fds=False, preexec_fn=_plain_signals)
    except OSError as error:
        _say(parent, {"code": 127, "error": f"{type(error).__name__}: {error}"})
        return 127
    _say(parent, {"pid": child.pid})
    _watch(parent, child)
    _kill_rest(child.pid)
    _say(parent, {"code": child.returncode, "peak_bytes": _peak_bytes()})
    return 0


def _watch(parent: socket.socket, child: "subprocess.Popen[bytes]") -> None:
    """Until the command has ended. Signals go to its whole group."""
    ended = _pidfd(child.pid)
    waits = [parent] if ended is None else [parent, ended]
    while child.poll() is None:
        ready, _, _ = select.select(waits, [], [], _POLL_S if ended is None else None)
        if parent not in ready:
            continue
        orders = parent.recv(64)
        number = signal.SIGTERM if orders and b"k" not in orders else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        if not orders:
            child.wait()
            return


def _kill_rest(group: int) -> None:
    """Whatever the command left running: its group, then those that had left the group and came to us as orphans."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    while pids := _children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _children() -> list[int]:
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split()]


def _adopt_orphans() -> None:
    """On Linux, processes that our descendants leave behind become our children."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _plain_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _say(parent: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        parent.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
