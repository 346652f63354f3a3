"""How fast a run is once it is open: from chunk to chunk, inside a whole call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from benchmarks.record import Window
from carpool.events import EpochsEnded, Event, GroupAdvanced


class Pace:
    """Listens to chunks alone, so that members' epochs are booked as without a listener.

    It hears of a chunk when it is enqueued. So it counts while every group has as many chunks under way as it ever has: after the first few
    of each, and `settled_s` after the first of all (machine code is enqueued 0.15 s ahead); and until one of them has no more.
    """

    hears = frozenset({GroupAdvanced})
    ahead = 4

    def __init__(self, clock: Callable[[], float] = time.perf_counter, settled_s: float = 0.0) -> None:
        self._clock, self._settled_s = clock, settled_s
        self._chunks: list[tuple[float, int, int]] = []

    def __call__(self, event: Event) -> None:
        assert isinstance(event, GroupAdvanced), event
        self._chunks.append((self._clock(), event.steps, event.group))

    def windows(self, parts: int = 1) -> tuple[Window, ...]:
        """From chunk to chunk, in so many parts one after another, or fewer; none of a run of too few chunks to tell."""
        seen = self._steady()
        parts = min(parts, len(seen) - 1)
        cuts = [round(part * (len(seen) - 1) / parts) for part in range(parts + 1)] if parts > 0 else []
        return tuple(
            Window(seen[stop][0] - seen[start][0], sum(steps for _, steps, _ in seen[start + 1 : stop + 1]))
            for start, stop in pairwise(cuts)
        )

    def _steady(self) -> list[tuple[float, int, int]]:
        last = {group: place for place, (_, _, group) in enumerate(self._chunks)}
        heard: Counter[int] = Counter()
        for place, (_, _, group) in enumerate(self._chunks):
            heard[group] += 1
            is_settled = self._chunks[place][0] - self._chunks[0][0] >= self._settled_s
            if is_settled and all(heard[each] > self.ahead for each in last):
                return self._chunks[place : min(last.values()) + 1]
        return []

    @property
    def rate(self) -> float | None:
        """Model-steps a second."""
        found = self.windows()
        return found[0].rate if found else None


class Ended:
    """Listens to epochs that have ended, together: they are told once they are computed, many in one moment where they were told so.

    It counts from the last epoch of one such moment to the last of all, `settled_s` after the first.
    """

    hears = frozenset({EpochsEnded})
    together_s = 0.002

    def __init__(
        self, epoch_steps: int, clock: Callable[[], float] = time.perf_counter, settled_s: float = 0.0
    ) -> None:
        self._epoch_steps, self._clock, self._settled_s = epoch_steps, clock, settled_s
        self._ended: list[tuple[float, int]] = []

    def __call__(self, event: Event) -> None:
        assert isinstance(event, EpochsEnded), event
        self._ended.append((self._clock(), len(event.names) * self._epoch_steps))

    def windows(self) -> tuple[Window, ...]:
        """One, or none of a run that is over before it has settled."""
        moments: list[tuple[float, int]] = []
        for at, steps in self._ended:
            if moments and at - moments[-1][0] < self.together_s:
                steps += moments.pop()[1]
            moments.append((at, steps))
        settled = [place for place, (at, _) in enumerate(moments) if at - moments[0][0] >= self._settled_s]
        if len(settled) < 2:
            return ()
        begun = settled[0]
        seconds = moments[-1][0] - moments[begun][0]
        return (Window(seconds, sum(steps for _, steps in moments[begun + 1 :])),)


class FirstStep:
    """Listens for the first steps of a run: `seconds` after this was made they were on their way."""

    hears = frozenset({GroupAdvanced})

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._made = clock, clock()
        self.seconds: float | None = None

    def __call__(self, event: Event) -> None:
        if self.seconds is None:
            self.seconds = self._clock() - self._made
