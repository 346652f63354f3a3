"""Ctrl-C at a safe place: the signal is noted when it comes and raised between chunks, so no state is half written.

A second Ctrl-C is raised at once, but never inside an import: Python forgets a module whose import breaks, and not what that had imported,
and no later import of it works. An import is finished, or not begun.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from types import FrameType, TracebackType
from typing import Any, Self


class _Taken(ABC):
    """Takes Ctrl-C while it is open. Outside the main thread, where signals cannot be taken, it does nothing."""

    _previous: Any = None
    _outside: FrameType | None = None
    """Who opened it."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._outside = sys._getframe(1)
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        self._outside = None

    @abstractmethod
    def _note(self, number: int, frame: FrameType | None) -> None: ...

    def _imports(self, frame: FrameType | None) -> bool:
        """Whether an import that began inside goes on there."""
        while frame is not None and frame is not self._outside:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False


class Pause(_Taken):
    """Notes Ctrl-C while it is open."""

    def __init__(self) -> None:
        self._asked = self._raised = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked and not self._imports(frame):
            self.check()
        self._asked = True

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C has come."""
        if self._asked:
            self._raised = True
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What came too late to be raised inside is for whoever is outside."""
        super().__exit__(kind, error, trace)
        if self._asked and not self._raised and error is None:
            signal.raise_signal(signal.SIGINT)


class WholeImports(_Taken):
    """Ctrl-C as ever, but one that comes in an import waits until this is closed."""

    def __init__(self) -> None:
        self._asked = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._imports(frame):
            self._asked = True
        elif callable(self._previous):
            self._previous(number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._asked:
            signal.raise_signal(signal.SIGINT)


class Bell(_Taken):
    """Ctrl-C for a loop that waits in `select`: counted, and the descriptor becomes readable. Nothing is raised while it is open."""

    def __init__(self) -> None:
        self.rung = 0
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._near.close()
        self._far.close()

    def fileno(self) -> int:
        """Readable when it has rung."""
        return self._near.fileno()

    def heard(self) -> int:
        """How often it has rung so far; quiet until it rings again."""
        with contextlib.suppress(BlockingIOError):
            self._near.recv(4096)
        return self.rung

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.rung += 1
        with contextlib.suppress(BlockingIOError):
            self._far.send(b"!")
