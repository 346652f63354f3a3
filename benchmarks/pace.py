"""How fast a run is once it is open: from chunk to chunk, inside a whole call."""

from __future__ import annotations

import time
from collections.abc import Callable

from carpool.events import Event, GroupAdvanced


class Pace:
    """Listens to chunks alone, so that members' epochs are booked as without a listener. The first few chunks are enqueued ahead."""

    hears = frozenset({GroupAdvanced})
    ahead = 4

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._chunks: list[tuple[float, int]] = []

    def __call__(self, event: Event) -> None:
        assert isinstance(event, GroupAdvanced), event
        self._chunks.append((self._clock(), event.steps))

    @property
    def rate(self) -> float | None:
        """Model-steps a second; None of a run of too few chunks to tell."""
        seen = self._chunks[self.ahead :]
        if len(seen) < 2:
            return None
        return sum(steps for _, steps in seen[1:]) / (seen[-1][0] - seen[0][0])
