"""The process between us and a command of ours: whatever happens to us, the command and all it started end.

Run by path with a bare interpreter (`python -I -S leash.py FD start COMMAND...`), so it imports the standard library alone and starts in
some 40 ms. It does not share the command's interpreter: a command that hangs in C, or holds its lock, is still stopped.

The socket FD carries "t" (terminate) and "k" (kill) in, and lines of JSON out: {"forked": ...} before the command runs, {"pid": ...} once it
does, {"code": ...} when it has ended (negative: a signal), with the most memory that one of its processes had. When the other end closes, we
are gone, and the command is killed.

Where this process is killed itself, another takes its place (`leash.py FD watch PID MARK`): it knows the command by its process, and what that
started by the mark in their environment, but not how it ends: {"gone": true}.
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
import time
from collections.abc import Callable
from pathlib import Path

MARK = "CARPOOL_LEASH"  # what a command and all that it starts have in their environment
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05  # where there is no pidfd


def main(descriptor: int, mode: str, words: list[str]) -> int:
    parent = socket.socket(fileno=descriptor)
    parent.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if mode == "watch":
        _take_over(parent, int(words[0]), words[1])
        return 0
    return _start(parent, words)


def _start(parent: socket.socket, command: list[str]) -> int:
    def begin() -> None:
        _say(parent, {"forked": os.getpid()})  # by itself: it is known even if we are killed now
        _plain_signals()

    _adopt_orphans()
    try:
        child = subprocess.Popen(command, process_group=0, close_fds=False, preexec_fn=begin)
    except OSError as error:
        _say(parent, {"code": 127, "error": f"{type(error).__name__}: {error}"})
        return 127
    _say(parent, {"pid": child.pid})
    _watch(parent, child.pid, _pidfd(child.pid), lambda: child.poll() is not None)
    _kill_rest(child.pid)
    _say(parent, {"code": child.returncode, "peak_bytes": _peak_bytes()})
    return 0


def _take_over(parent: socket.socket, pid: int, mark: str) -> None:
    """Watches a command whose first leash was killed. It is no child of ours, so nobody tells us how it ends."""
    ended = _pidfd(pid)
    _watch(parent, pid, ended, lambda: _is_gone(pid, ended))
    end_all(pid, mark)
    _say(parent, {"gone": True})


def end_all(pid: int, mark: str) -> None:
    """Kills a command and what it started, whose child it may not be."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    while pids := _marked(mark):
        for each in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(_POLL_S)


def _watch(parent: socket.socket, pid: int, ended: int | None, has_ended: Callable[[], bool]) -> None:
    """Until the command has ended. Signals go to its whole group."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    if ended is not None:
        poll.register(ended, select.POLLIN)
    while not has_ended():
        found = dict(poll.poll(1e3 * _POLL_S if ended is None else None))
        if parent.fileno() not in found:
            continue
        orders = _orders(parent)
        number = signal.SIGTERM if orders and b"k" not in orders else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        if not orders:
            poll.unregister(parent)


def _orders(parent: socket.socket) -> bytes:
    try:
        return parent.recv(64)
    except OSError:
        return b""


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


def _marked(mark: str) -> list[int]:
    """The processes that have the mark, where the system tells."""
    own, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if own in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _is_gone(pid: int, ended: int | None) -> bool:
    if ended is not None:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        return bool(poll.poll(0))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


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
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
