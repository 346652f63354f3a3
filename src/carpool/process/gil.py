"""How much of a function's time Python's interpreter lock is held, so that nothing else in the process can run Python.

A second thread wants to wake every half millisecond and sees how late it is: while the lock is held it waits for it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_NAP_S = 0.0005
_IDLE_NAPS = 20
_SLACK_S = 0.0005  # a busy machine wakes a thread so late without any lock; one that waits for the lock waits 5 ms for Python code


@dataclass(frozen=True)
class Held:
    """The share of the time, 0 to 1, and how long a call took."""

    share: float
    call_s: float


@dataclass
class _Sleeper:
    """Naps, and notes how late it wakes."""

    late_s: list[float] = field(default_factory=list)
    queued_s: float = 0.0
    """How long it had to wait for a core: that is no lock."""
    done: threading.Event = field(default_factory=threading.Event)

    def nap(self) -> None:
        started = time.perf_counter()
        time.sleep(_NAP_S)
        self.late_s.append(time.perf_counter() - started - _NAP_S)

    def run(self) -> None:
        before_s = _queued_s()
        while not self.done.is_set():
            self.nap()
        self.queued_s = _queued_s() - before_s


def held(function: Callable[[], object], least_s: float = 0.1) -> Held:
    """Calls the function until so long has passed, at least once."""
    idle = _Sleeper()
    for _ in range(_IDLE_NAPS):
        idle.nap()
    usual_s = statistics.median(idle.late_s)  # what the system's timers are late by
    sleeper = _Sleeper()
    thread = threading.Thread(target=sleeper.run, daemon=True)
    thread.start()
    started, calls = time.perf_counter(), 0
    try:
        while not calls or time.perf_counter() - started < least_s:
            function()
            calls += 1
        seconds = time.perf_counter() - started
    finally:
        sleeper.done.set()
        thread.join()
    late_s = sum(late for late in sleeper.late_s if late > usual_s + _SLACK_S)
    return Held(min(1.0, max(0.0, late_s - sleeper.queued_s) / seconds), seconds / calls)


def _queued_s() -> float:
    """How long this thread has been ready to run without a core, so far; 0 where the system does not tell."""
    try:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    except OSError:
        return 0.0
    return int(text.split()[1]) / 1e9
