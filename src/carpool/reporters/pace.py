"""How fast a run goes: steps a second over the last few seconds."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 10.0


class Pace:
    """Steps a second over a sliding window; fed with the time and the steps so far.

    >>> pace = Pace(now=0.0)
    >>> pace.at(2.0, steps=100), pace.at(4.0, steps=300)
    (50.0, 75.0)
    """

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def at(self, now: float, steps: int) -> float:
        """The pace at this moment."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - _WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        self._samples.append((now, steps))
        return (steps - before) / (now - since) if now > since else 0.0
