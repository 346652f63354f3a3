"""carpool through its public API, as a user would call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

import carpool
from benchmarks.pace import Ended, FirstStep, Pace
from benchmarks.precision import of_job
from benchmarks.record import OURS, Measured, Window
from benchmarks.windows import Way, timed
from benchmarks.workloads import Data, Member, Workload, accuracy, loss
from carpool.events import Emit, EpochEnded, Event, GroupAdvanced, GroupStarted, GroupVerified

# A chunk is an epoch at most: with so many, the time between chunks tells the pace, and no member's epoch need be heard of.
_PACED_EPOCHS = 8
_PACED_S = 2.0
_SETTLED_S = 0.4


class Silent:
    """Hears nothing."""

    hears: frozenset[type[Event]] = frozenset()

    def __call__(self, event: Event) -> None:
        return


@dataclass(frozen=True)
class Order:
    """What to train, for how long, where."""

    workload: Workload
    members: tuple[Member, ...]
    data: Data
    epochs: int
    device: str = "cpu"
    compile: str | bool = True

    @property
    def steps(self) -> int:
        """Steps of one member."""
        return self.epochs * self.workload.epoch_steps


class Carpool(Way):
    """A warm window is a whole call of `carpool.train`: jobs built, planned, checked, trained, results read."""

    name = OURS

    def __init__(self, order: Order, calls: int | None = None, parts: int = 1) -> None:
        """A window in each round, or only in so many; what it does once open is cut in so many parts a window."""
        self.members, self.rounds = len(order.members), calls
        self._order, self._parts = order, parts
        self._steady: list[Window] = []
        self._first_step_s: float | None = None
        self._peak_bytes: int | None = None
        self._notes: dict[str, None] = {}

    def prepare(self) -> Window:
        first = FirstStep()
        window = timed(lambda: self._train(first))
        self._first_step_s = first.seconds
        return window

    def window(self) -> Window:
        if self._order.device == "cpu":  # machine code is enqueued ahead: its pace shows in a longer call
            window = timed(lambda: self._train(Silent()))
            pace = Ended(self._order.workload.epoch_steps, settled_s=_SETTLED_S)
            train(replace(self._order, epochs=self._longer(window)), pace)
            self._steady += pace.windows()
            return window
        watch = Pace() if self._order.epochs >= _PACED_EPOCHS else Stopwatch()
        window = timed(lambda: self._train(watch))
        self._steady += watch.windows(self._parts)
        return window

    def _longer(self, window: Window) -> int:
        """Epochs that take a second or two: as many as a first guess of the pace says, at least what was called."""
        steps = len(self._order.members) * self._order.workload.epoch_steps
        known = max((window.rate, *(each.rate for each in self._steady)))
        return max(self._order.epochs, 8, int(known * _PACED_S / steps))

    def _train(self, watch: Emit) -> int:
        held = torch.cuda.memory_allocated(self._order.device) if self._order.device != "cpu" else 0
        results = train(self._order, watch)
        if self._peak_bytes is None:  # of the first call: later ones have the peers' memory beside them
            peak = max(result.peak_bytes or 0 for result in results)
            self._peak_bytes = peak - held if peak else None
        self._notes |= {f"{r.strategy}: {r.reason}": None for r in results if r.strategy != "fused"}
        return sum(result.steps for result in results)

    def finished(self, measured: Measured) -> Measured:
        note = measured.note or "; ".join(self._notes)
        return replace(
            measured,
            steady=tuple(self._steady),
            first_step_s=self._first_step_s,
            peak_bytes=self._peak_bytes,
            note=note[:300],
        )


def train(order: Order, reporter: Emit | None = None) -> carpool.Results:
    """All members by carpool, with the default strategy."""
    reporters = [reporter] if reporter is not None else []
    return carpool.train(jobs(order), device=order.device, reporters=reporters, compile=order.compile)


def jobs(order: Order) -> Sequence[carpool.Job]:
    """One for each member."""
    workload = order.workload
    return [
        carpool.Job(
            workload.make,
            data=(order.data.x, order.data.y),
            name=f"{workload.name}-{member.seed}",
            loss=loss,
            metrics={"accuracy": accuracy},
            optimizer=partial(torch.optim.Adam, lr=member.lr),
            batch_size=workload.batch_size,
            epochs=order.epochs,
            seed=member.seed,
            precision=of_job(workload.precision),
        )
        for member in order.members
    ]


class Stopwatch:
    """Listens to a run's events: from when its last group has passed its first check to the last epoch's end.

    Building, planning, opening and checking are left out; what is captured or compiled after the check is not.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._stop = 0.0
        self._steps = 0
        self._advanced: set[int] = set()

    def __call__(self, event: Event) -> None:
        match event:
            case GroupStarted():
                self._begin()
            case GroupVerified(group) if group not in self._advanced:
                self._begin()
            case GroupAdvanced(group, steps):
                self._advanced.add(group)
                self._steps += steps
            case EpochEnded():
                self._stop = self._clock()
            case _:
                pass

    def _begin(self) -> None:
        self._start, self._steps = self._clock(), 0

    def windows(self, parts: int = 1) -> tuple[Window, ...]:
        """One of all groups together, whatever the parts; none when no epoch ended."""
        seconds = self._stop - self._start
        return (Window(seconds, self._steps),) if seconds > 0 and self._steps else ()
