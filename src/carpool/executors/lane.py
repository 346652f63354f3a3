"""One driver among several: what it waits for, and how much of the device's time it has had."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from carpool.adapters.base import JobState
from carpool.executors.driver import Ready, at_once
from carpool.executors.member import Member


class Driving(Protocol):
    """What a lane asks of a driver."""

    slice_s: float | None

    def run(self, verify: bool = False, measure: bool = False) -> Iterator[Ready]: ...

    def interrupt(self) -> None: ...

    @property
    def unfinished(self) -> tuple[Member, ...]: ...

    def salvage(self) -> dict[str, tuple[Member, JobState]]: ...


class Held(Protocol):
    """What a lane, and whoever closes it, asks of what it holds."""

    def turn(self) -> AbstractContextManager[object]: ...

    def busy_s(self) -> float | None: ...

    def close(self) -> None: ...


class Lane:
    """A session and its driver, advanced a chunk at a time. Its share of the time is its weight."""

    def __init__(
        self, driver: Driving, session: Held, verify: bool, measure: bool, weight: float, start_s: float
    ) -> None:
        self.driver, self.session = driver, session
        self._steps = driver.run(verify, measure)
        self._ready = at_once
        self._weight = weight
        self._start_s = start_s
        self._host_s = 0.0
        self._opened_s = time.perf_counter()

    @property
    def ready(self) -> bool:
        return self._ready()

    @property
    def seconds(self) -> float:
        """Since it was opened."""
        return time.perf_counter() - self._opened_s

    @property
    def busy_s(self) -> float:
        """How long it has used the device; where the session does not say, how long it has held the host."""
        busy_s = self.session.busy_s()
        return self._host_s if busy_s is None else busy_s

    @property
    def used_s(self) -> float:
        """The time it has had, divided by its weight, counted from where the others stood when it came."""
        return self._start_s + self.busy_s / self._weight

    def advance(self) -> bool:
        """Runs to the next pause; False when the driver is through."""
        started = time.perf_counter()
        try:
            with self.session.turn():
                self._ready = next(self._steps)
        except StopIteration:
            return False
        finally:
            self._host_s += time.perf_counter() - started
        return True

    def interrupt(self) -> None:
        with self.session.turn():
            self.driver.interrupt()

    def abandon(self) -> None:
        """The driver is not asked again, wherever it stood."""
        self._steps.close()  # type: ignore[attr-defined]  # a generator


def next_lane(lanes: Sequence[Lane]) -> Lane | None:
    """Of the lanes that can go on, the one that has had the least time; None when all of them wait."""
    return min((lane for lane in lanes if lane.ready), key=lambda lane: lane.used_s, default=None)
