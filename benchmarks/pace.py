"""How fast a run is once it is open: from chunk to chunk, inside a whole call."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.record import Window
from carpool.events import Event, GroupAdvanced


class Pace:
    """Listens to chunks alone, so that members' epochs are booked as without a listener. The first few chunks are enqueued ahead."""

    hears = frozenset({GroupAdvanced})
    ahead = 4

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._chunks: list[tuple[float, int]] = []
        self._groups: set[int] = set()
        self._begun = 0

    def __call__(self, event: Event) -> None:
        assert isinstance(event, GroupAdvanced), event
        if event.group not in self._groups:  # until then some were being opened
            self._groups.add(event.group)
            self._begun = len(self._chunks)
        self._chunks.append((self._clock(), event.steps))

    def window(self) -> Window | None:
        """From chunk to chunk, once every group has had one; None of a run of too few chunks to tell."""
        seen = self._chunks[self._begun + self.ahead :]
        if len(seen) < 2:
            return None
        return Window(seen[-1][0] - seen[0][0], sum(steps for _, steps in seen[1:]))

    @property
    def rate(self) -> float | None:
        """Model-steps a second."""
        window = self.window()
        return window.rate if window else None


class FirstStep:
    """Listens for the first steps of a run: `seconds` after this was made they were on their way."""

    hears = frozenset({GroupAdvanced})

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._made = clock, clock()
        self.seconds: float | None = None

    def __call__(self, event: Event) -> None:
        if self.seconds is None:
            self.seconds = self._clock() - self._made
