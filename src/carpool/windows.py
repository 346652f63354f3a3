"""Timing ways of doing one thing beside each other: windows that alternate, their medians, and whether they can be trusted.

A machine that others use at the same time slows whatever runs just then. So the ways take turns, and what they took is
believed only where nearly all turns say the same.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST = 5
ENOUGH_S = 1.0
"""Long runs say enough in fewer windows."""
_APART = 1.5  # ratios of two ways further apart than this, the oddest one left out, do not agree
_WAITED = 0.1  # of the time that this process ran or could have run: from here on the machine is busy


@dataclass(frozen=True)
class Measured:
    """The median seconds of each way. `agrees`: nearly all windows show the same; `busy`: others used the processors."""

    seconds: tuple[float, ...]
    agrees: bool
    busy: bool


def measured(ways: Sequence[Callable[[], float]], most: int = MOST) -> Measured:
    """Times each way, which returns the seconds that it took, in windows that alternate; a first one does not count.

    >>> measured([lambda: 2.0, lambda: 1.0]).seconds
    (2.0, 1.0)
    """
    for way in ways:
        way()
    waited, windows, began = Waited(), list[tuple[float, ...]](), time.perf_counter()
    while len(windows) < most and not (windows and time.perf_counter() - began > ENOUGH_S):
        windows.append(tuple(way() for way in ways))
    seconds = tuple(statistics.median(taken) for taken in zip(*windows, strict=True))
    return Measured(seconds, agree(windows), waited.share() > _WAITED)


def agree(windows: Sequence[Sequence[float]]) -> bool:
    """Whether the windows show about the same ratio of each way to the first.

    >>> agree([(2.0, 1.0), (2.1, 1.0), (9.0, 1.0)]), agree([(2.0, 1.0), (1.0, 1.0), (4.0, 1.0)])
    (True, False)
    """
    for way in range(1, len(windows[0])):
        ratios = sorted(window[0] / max(window[way], 1e-12) for window in windows)
        middle = statistics.median(ratios)
        if len(ratios) > 2:
            ratios.remove(max(ratios, key=lambda ratio: max(ratio / middle, middle / ratio)))
        if ratios[-1] > _APART * ratios[0]:
            return False
    return True


class Waited:
    """How long this process's threads have been ready to run without a processor, since this was made."""

    def __init__(self) -> None:
        self._ran, self._queued = _scheduled()

    def share(self) -> float:
        """Waiting as a share of running and waiting; 0 where the system does not tell."""
        ran, queued = _scheduled()
        queued = max(0, queued - self._queued)
        return queued / max(1, max(0, ran - self._ran) + queued)


def _scheduled() -> tuple[int, int]:
    """Nanoseconds that the threads of this process have run, and have waited for a processor."""
    ran = queued = 0
    for thread in _threads():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (thread / "schedstat").read_text().split()
            ran, queued = ran + int(fields[0]), queued + int(fields[1])
    return ran, queued


def _threads() -> list[Path]:
    try:
        return list(Path(f"/proc/{os.getpid()}/task").iterdir())
    except OSError:
        return []
