"""A command run as our child: watched, stopped with all it started, and gone when we are."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from carpool.process import leash
from carpool.process.ready import ready

Stream = int | IO[Any] | None
_UNTOLD = 255  # the code of a command that ended while nobody who would be told watched it


class Child:
    """A running command. `code` is its exit code once it has ended, negative where a signal ended it.

    >>> with Child([sys.executable, "-c", "raise SystemExit(3)"]) as child:
    ...     child.wait()
    3
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        pass_fds: Iterable[int] = (),
    ) -> None:
        self.command = tuple(command)
        self.pid: int | None = None
        self.code: int | None = None
        self.error: str | None = None
        """Why the command could not be started."""
        self.peak_bytes: int | None = None
        """Once it has ended: the most host memory that one of its processes had."""
        self._text = b""
        self._forked: int | None = None
        self._mark = secrets.token_hex(8)
        marked = {**(os.environ if env is None else env), leash.MARK: self._mark}
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        self._socket, self._leash = _leashed(
            "start", *command, pass_fds=pass_fds, env=marked, cwd=cwd, **streams
        )
        self._pipes = [pipe for pipe in (self._leash.stdin, self._leash.stdout, self._leash.stderr) if pipe]
        self.stdout = self._leash.stdout
        """The command's output, where a pipe was asked for."""
        self._hear(until=lambda: self.pid is not None or self.code is not None, timeout_s=None)

    def poll(self) -> int | None:
        """The exit code, if the command has ended."""
        self._hear(until=lambda: True, timeout_s=0)
        return self.code

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code; None when the command still runs after so long."""
        self._hear(until=lambda: self.code is not None, timeout_s=timeout_s)
        return self.code

    def terminate(self) -> None:
        """Asks the command, and what it started, to end."""
        self._order(b"t")

    def kill(self) -> None:
        """Ends them."""
        self._order(b"k")

    def stop(self, grace_s: float = 5.0) -> int:
        """Terminates, after the grace kills, and waits until nothing is left."""
        if self.poll() is None:
            self.terminate()
            if self.wait(grace_s) is None:
                self.kill()
        code = self.wait()
        self._leash.wait()
        assert code is not None
        return code

    def rss_bytes(self) -> int | None:
        """Host memory of the command and its descendants; None where the system does not tell."""
        return None if self.pid is None else _tree_rss(self.pid)

    def processor_s(self) -> float:
        """Processor seconds that the command and its descendants have taken; 0 where the system does not tell."""
        return 0.0 if self.pid is None else _tree_s(self.pid)

    def fileno(self) -> int:
        """Readable when there is news of the command: for `select` beside others."""
        return self._socket.fileno()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills the command if it still runs, and gives everything back."""
        if self.code is None:
            self.kill()
            self.wait()
        self._leash.wait()
        for pipe in self._pipes:
            pipe.close()
        self._socket.close()

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(order)

    def _hear(self, until: Any, timeout_s: float | None) -> None:
        """Reads what the leash says."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self.code is None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not ready([self._socket], left):
                return
            self._take(self._socket.recv(4096))
            if until():
                return

    def _take(self, text: bytes) -> None:
        if not text:
            self._retake()
            return
        *lines, self._text = (self._text + text).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._forked = message.get("forked", self._forked)
            self.pid = message.get("pid", self.pid)
            self.code = message.get("code", self.code)
            self.error = message.get("error", self.error)
            self.peak_bytes = message.get("peak_bytes", self.peak_bytes)
            if message.get("gone"):
                self._end_untold()

    def _retake(self) -> None:
        """The leash itself was killed: another takes its place, and the command goes on."""
        self._leash.wait()
        self._text = b""
        if self._forked is None:
            self.code, self.error = _UNTOLD, "the process that was to start it was killed"
            return
        self.pid = self._forked
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        try:
            ours, self._leash = _leashed("watch", str(self.pid), self._mark, **quiet)
        except OSError as error:  # unwatched it could outlive us
            leash.end_all(self.pid, self._mark)
            why = f"the process that watched it was killed, and no other can be started ({error})"
            self.code, self.error = -signal.SIGKILL, why
            return
        with ours:  # the number stays: somebody may wait for it beside others
            os.dup2(ours.fileno(), self._socket.fileno(), inheritable=False)

    def _end_untold(self) -> None:
        """It has ended under a leash that was not told how; where orphans come to us, the system tells us."""
        assert self.pid is not None
        self.code = _UNTOLD
        try:
            _, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            self.error = "the process that watched it was killed, so how it ended is not known"


def _leashed(
    *words: str, pass_fds: Iterable[int] = (), **options: Any
) -> tuple[socket.socket, subprocess.Popen[Any]]:
    """A leash that was told this, and our end of its socket."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            command = [sys.executable, "-I", "-S", leash.__file__, str(theirs.fileno()), *words]
            inherited = (theirs.fileno(), *pass_fds)
            return ours, subprocess.Popen(command, pass_fds=inherited, start_new_session=True, **options)
    except BaseException:
        ours.close()
        raise


def _tree_s(pid: int) -> float:
    """Processor seconds of a process, of its children that have ended, and of its descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = sum(int(field) for field in fields[11:15])
    except (OSError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_tree_s(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _tree_rss(pid: int) -> int | None:
    """Resident bytes of a process and its descendants, from /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_tree_rss(child) or 0 for child in _children(pid))
