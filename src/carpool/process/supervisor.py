"""Our side of a worker: started with an environment, given calls, listened to, stopped, and its end told as a story."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from carpool.errors import WorkerError, described, failure
from carpool.memory.size import shown
from carpool.process.child import Child
from carpool.process.messages import Beat, Call, Message, Raised, Started
from carpool.process.wire import Blocks, Channel, Closed, Frame
from carpool.process.worker import STACKS_SIGNAL

_GRACE_S = 2.0
_START_S = 60.0  # what a worker may take to say its first word, however short its timeout
_STACKS_S = 2.0  # how long a worker may take to write its stacks
_STORY_LINES = 40


class Supervisor:
    """A worker process. It runs one call at a time; `poll` gives what it says, and raises WorkerError when it has died.

    >>> with Supervisor() as worker:
    ...     worker.call(Call(sum, ([1, 2],)))
    ...     worker.wait()
    Returned(value=3)
    """

    def __init__(self, env: Mapping[str, str] | None = None, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s
        self.started: Started | None = None
        self.beat: Beat | None = None
        self.peak_rss_bytes = 0
        self._lines: deque[str] = deque(maxlen=_STORY_LINES)
        ours, theirs = socket.socketpair()
        self._asking, asked = socket.socketpair()
        self._asked = 0
        reading, writing = os.pipe()
        try:
            with theirs, asked:
                passed = [theirs.fileno(), asked.fileno()]
                command = [sys.executable, "-P", "-m", "carpool.process", *map(str, passed)]
                environment = {**os.environ, **(env or {}), "PYTHONPATH": _path()}
                self._child = Child(command, env=environment, stderr=writing, pass_fds=passed)
        finally:
            os.close(writing)
        self._channel = Channel(ours)
        self._reader = threading.Thread(target=_pass_on, args=(reading, self._lines), daemon=True)
        self._reader.start()
        self.progress_s = time.monotonic()
        """When it last said something that shows progress."""

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def fileno(self) -> int:
        """Readable when it has said something, or died: for `ready`."""
        return self._channel.fileno()

    def call(self, call: Call, blocks: Blocks | None = None) -> None:
        """Gives the worker something to do. Raises what pickling the call raises; a dead worker is told by `poll`."""
        self.progress_s = time.monotonic()
        with contextlib.suppress(Closed):
            self._channel.send(call, blocks)

    def poll(self) -> Message | None:
        """The next thing the worker says, if it has said one. Raises WorkerError when it has died, or made no progress for too long."""
        self._child.poll()  # where what holds it was killed, that is mended now
        while (frame := self._frame()) is not None:
            message = _decoded(frame)
            if isinstance(message, Started):
                self.started = message
                self.progress_s = time.monotonic()
            elif isinstance(message, Beat):
                self.beat = message
                self.peak_rss_bytes = max(self.peak_rss_bytes, message.rss_bytes or 0)
            else:
                self.progress_s = time.monotonic()
                return message
        if self.timeout_s is not None:
            most_s = self.timeout_s if self.started else max(self.timeout_s, _START_S)
            if time.monotonic() - self.progress_s > most_s:
                raise self._timed_out(most_s)
        return None

    def wait(self, most_s: float | None = None) -> Message | None:
        """The next thing the worker says; None when it says nothing for so long."""
        end = None if most_s is None else time.monotonic() + most_s
        while (message := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                return None
            time.sleep(0.002)
        return message

    def interrupt(self) -> None:
        """Ctrl-C for the function that runs in the worker."""
        self._signal(signal.SIGINT)

    def stop(self) -> None:
        """Terminates, kills, joins. Nothing of the worker is left."""
        if self._child.poll() is None:
            self._child.stop(_GRACE_S)
        self._child.close()
        self._reader.join(_GRACE_S)
        self._channel.close()
        self._asking.close()

    def kill(self) -> None:
        """Ends it at once; for `stop` nothing is left to wait for."""
        self._child.kill()

    def stacks(self) -> str:
        """Where each thread of the worker is, in Python: asked politely, then, where something holds Python's lock, by a signal."""
        self._lines.clear()
        self._asked += 1
        own = bytes([self._asked % 256])
        try:
            self._asking.settimeout(_STACKS_S)
            self._asking.send(own)
            # An answer that comes late is to an earlier question.
            while self._asking.recv(1) not in (own, b""):
                pass
        except OSError:
            self._signal(STACKS_SIGNAL)
        end, count = time.monotonic() + _STACKS_S, 0
        while time.monotonic() < end and not (count and count == len(self._lines)):
            count = len(self._lines)
            time.sleep(0.1)
        return "\n".join(self._lines)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _frame(self) -> Frame | None:
        try:
            return self._channel.poll()
        except Closed:
            raise self._died() from None

    def _died(self) -> WorkerError:
        code = self._child.wait(_GRACE_S)
        if code is None:  # it closed its socket and lives on: nothing can be said to it any more
            code = self._child.stop(_GRACE_S)
        self._reader.join(_GRACE_S)
        return WorkerError(f"A worker process {_end(code)}{self._held()}.{self._story()}")

    def _timed_out(self, timeout_s: float) -> WorkerError:
        stacks = self.stacks()
        self.stop()
        story = f" It was here:\n{stacks}" if stacks else " It did not say where it was."
        return WorkerError(
            f"A worker process made no progress for {timeout_s:g} s and was stopped{self._held()}.{story}"
        )

    def _held(self) -> str:
        if self.beat is None or self.beat.rss_bytes is None:
            return ""
        device = f" and {shown(self.beat.device_bytes)} on its device" if self.beat.device_bytes else ""
        return f" (it last held {shown(self.beat.rss_bytes)} of memory{device})"

    def _story(self) -> str:
        return (
            " The last lines it wrote:\n" + "\n".join(self._lines)
            if self._lines
            else " It wrote nothing about it."
        )

    def _signal(self, number: int) -> None:
        if self._child.poll() is None and self._child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)


def _pass_on(descriptor: int, lines: deque[str]) -> None:
    """Keeps the last lines of what a worker writes to its stderr, and passes all of it on.

    No method: a thread that held the supervisor would keep a worker that nobody else holds.
    """
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        for line in file:
            lines.append(line.rstrip("\n"))
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(line)


def _decoded(frame: Frame) -> Message:
    """What it says; what cannot be read here, a class that only the worker can import, is the call's failure."""
    try:
        return frame.decode()
    except BaseException as error:
        failure(error)
        why = f"What a worker process returned cannot be read here: {described(error)}"
        return Raised(WorkerError(why))


def _path() -> str:
    """Our own path for modules: what can be imported here can be imported there."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _end(code: int) -> str:
    """How it ended, in words.

    >>> _end(3), _end(-9)
    ('ended with exit code 3', 'was killed by SIGKILL')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
