"""A command run as our child: watched, stopped with all it started, and gone when we are."""

from __future__ import annotations

import contextlib
import json
import os
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
        self._socket, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), *pass_fds)
            self._leash = subprocess.Popen(
                [sys.executable, "-I", "-S", leash.__file__, str(theirs.fileno()), *command],
                env=None if env is None else dict(env),
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=inherited,
                start_new_session=True,
            )
        self._hear(until=lambda: self.pid is not None or self.code is not None, timeout_s=None)

    @property
    def stdout(self) -> IO[bytes] | None:
        """The command's output, where a pipe was asked for."""
        return self._leash.stdout

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
        for held in (self._leash.stdin, self._leash.stdout, self._leash.stderr):
            if held is not None:
                held.close()
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
        if not text:  # the leash itself is gone
            self.code = self._leash.wait() or 1 if self.code is None else self.code
            return
        *lines, self._text = (self._text + text).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.pid = message.get("pid", self.pid)
            self.code = message.get("code", self.code)
            self.error = message.get("error", self.error)
            self.peak_bytes = message.get("peak_bytes", self.peak_bytes)


def _tree_rss(pid: int) -> int | None:
    """Resident bytes of a process and its descendants, from /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except (OSError, IndexError):
        return None
    total = pages * os.sysconf("SC_PAGE_SIZE")
    for task in tasks:
        with contextlib.suppress(OSError):
            total += sum(_tree_rss(int(child)) or 0 for child in (task / "children").read_text().split())
    return total
