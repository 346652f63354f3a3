"""Ctrl-C at a safe place: the signal is noted when it comes and raised between chunks, so no state is half written.

A second Ctrl-C is raised at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Pause:
    """Notes Ctrl-C while it is open. Outside the main thread, where signals cannot be taken, it does nothing."""

    def __init__(self) -> None:
        self._asked = False
        self._previous: Any = None

    def __enter__(self) -> Pause:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C has come."""
        if self._asked:
            raise KeyboardInterrupt
