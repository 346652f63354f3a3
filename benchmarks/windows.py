"""Alternating windows: window 1 of every way, then window 2 of every way, so that drift hits all ways alike."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.record import Measured, Window

Clock = Callable[[], float]
_LATE = "skipped: out of time"


class Unavailable(Exception):
    """This machine lacks what a way needs; its text is the way's note."""


class Way(ABC):
    """One way to train the models of a row."""

    name: str
    members: int
    rounds: int | None = None
    """In how many rounds it has a window; None: in all."""

    def begin(self) -> None:
        """Starts what `prepare` will wait for, in processes of its own, while others are prepared."""
        return

    @abstractmethod
    def prepare(self) -> Window:
        """The first call: builds, compiles, warms up."""

    @abstractmethod
    def window(self) -> Window:
        """One warm window."""

    def close(self) -> None:
        """Gives back what `prepare` took."""
        return

    def finished(self, measured: Measured) -> Measured:
        """Adds what only the way itself knows."""
        return measured


class Called(Way):
    """A way that is a function: it trains, waits for the device, and returns how many model-steps it took."""

    def __init__(
        self,
        name: str,
        members: int,
        run: Callable[[], int],
        first: Callable[[], int] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.name, self.members = name, members
        self._run, self._first, self._clock = run, first or run, clock

    def prepare(self) -> Window:
        return timed(self._first, self._clock)

    def window(self) -> Window:
        return timed(self._run, self._clock)


def timed(run: Callable[[], int], clock: Clock = time.perf_counter) -> Window:
    """The window in which `run` took its model-steps."""
    started = clock()
    steps = run()
    return Window(clock() - started, steps)


def measure(
    ways: Sequence[Way], windows: int, *, deadline: float = math.inf, clock: Clock = time.perf_counter
) -> tuple[Measured, ...]:
    """Prepares every way and runs their windows in turns.

    The first is prepared alone; with the others, whatever can start beside them does. Past the deadline no further way is
    prepared and no further round begins; the first round is always run. What a way raises is its own note, and the others go on.
    """
    found: dict[str, Measured] = {}
    try:
        for way in ways:
            late = bool(found) and clock() > deadline
            if len(found) == 1 and not late:
                found |= _begun(ways[1:])
            if way.name not in found:
                found[way.name] = Measured(way.name, way.members, note=_LATE) if late else _prepared(way)
        for number in range(windows):
            if number and clock() > deadline:
                break
            for way in ways:
                if number in _rounds(way, windows):
                    found[way.name] = _windowed(way, found[way.name])
        return tuple(way.finished(found[way.name]) for way in ways)
    finally:
        for way in ways:
            way.close()


def measure_apart(
    ways: Sequence[Way],
    windows: int,
    between: Callable[[], None],
    *,
    deadline: float = math.inf,
    clock: Clock = time.perf_counter,
) -> tuple[Measured, ...]:
    """The same with one way at a time, for those whose memory does not fit side by side; `between` gives back what one held."""
    found: list[Measured] = []
    for way in ways:
        if found and clock() > deadline:
            found.append(Measured(way.name, way.members, note=_LATE))
            continue
        found += measure([way], windows, deadline=deadline, clock=clock)
        between()
    return tuple(found)


def _begun(ways: Sequence[Way]) -> dict[str, Measured]:
    """Those that could not even begin."""
    failed: dict[str, Measured] = {}
    for way in ways:
        try:
            way.begin()
        except Exception as error:
            failed[way.name] = Measured(way.name, way.members, note=_failed(error))
    return failed


def _prepared(way: Way) -> Measured:
    try:
        return Measured(way.name, way.members, first=way.prepare())
    except Exception as error:
        return Measured(way.name, way.members, note=_failed(error))


def _rounds(way: Way, windows: int) -> set[int]:
    """Those rounds in which it has a window, spread over all of them."""
    wanted = windows if way.rounds is None else min(way.rounds, windows)
    return {round(place * (windows - 1) / max(1, wanted - 1)) for place in range(wanted)}


def _windowed(way: Way, so_far: Measured) -> Measured:
    if so_far.note:
        return so_far
    try:
        return replace(so_far, windows=(*so_far.windows, way.window()))
    except Exception as error:
        return replace(so_far, note=_failed(error))


def _failed(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return str(error)[:300]
    return f"failed: {type(error).__name__}: {error}"[:300]
