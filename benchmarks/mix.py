"""Eight different models together on one GPU, two of each structure, a fixed number of steps each.

The score of a way is how long the eight take one after another in an eager loop, divided by the way's makespan. The peers'
makespans leave out building, compiling and capturing; carpool's is given as a whole call, and as what a call with twice the steps
takes longer, which leaves that out too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

import carpool
from benchmarks.peers_cuda import captured_plain_step, plain_step
from benchmarks.workloads import WORKLOADS, Data, Member, Workload, accuracy, loss
from carpool.events import Event, GroupEnded

MIX = ("tiny", "mlp", "cnn", "tfm") * 2
LONG = 8  # times the steps in the run that the shares are read from, so that opening weighs little


@dataclass
class Mixed:
    """What a run measured: seconds of every way, window by window, and the steps of each model."""

    steps: dict[str, int]
    eager_s: list[float] = field(default_factory=list)
    threads_s: list[float] = field(default_factory=list)
    compiled_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    twice_s: list[float] = field(default_factory=list)
    first_s: float = 0.0
    long_s: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """With the scores, which are ratios of medians."""
        eager = median(self.eager_s)
        ways = {
            "threads + CUDA graphs": self.threads_s,
            "threads + compiled CUDA graphs": self.compiled_s,
            "carpool, whole call": self.whole_s,
            "carpool, once open": [two - one for one, two in zip(self.whole_s, self.twice_s, strict=True)],
        }
        scores = {way: round(eager / median(seconds), 2) for way, seconds in ways.items() if seconds}
        return {**asdict(self), "scores": scores}


def run(device: str, worth_s: float, windows: int, compiled: bool, say: Callable[[str], None]) -> Mixed:
    """All ways in turns, window by window."""
    data = {name: WORKLOADS[name].data().to(device) for name in dict.fromkeys(MIX)}
    epochs = {name: _epochs(WORKLOADS[name], data[name], worth_s) for name in data}
    mixed = Mixed({name: epochs[name] * WORKLOADS[name].epoch_steps for name in data})
    say(f"steps each: {mixed.steps}")
    threads = _Threads([_captured(i, name, data[name], False) for i, name in enumerate(MIX)])
    quick = (
        _Threads([_captured(i, name, data[name], True) for i, name in enumerate(MIX)]) if compiled else None
    )
    steps = [mixed.steps[name] for name in MIX]
    mixed.first_s = _ours(data, epochs, device)[0]
    for _ in range(windows):
        mixed.eager_s.append(_eager(data, mixed.steps))
        mixed.threads_s.append(threads.run(steps))
        if quick is not None:
            mixed.compiled_s.append(quick.run(steps))
        mixed.whole_s.append(_ours(data, epochs, device)[0])
        twice, _ = _ours(data, {name: 2 * count for name, count in epochs.items()}, device)
        mixed.twice_s.append(twice)
        say(
            f"eager {mixed.eager_s[-1]:.2f} s, threads {mixed.threads_s[-1]:.2f} s,"
            f" ours {mixed.whole_s[-1]:.2f} s, twice the steps {twice:.2f} s"
        )
    mixed.long_s, mixed.shares = _ours(data, {name: LONG * count for name, count in epochs.items()}, device)
    say(f"shares over {mixed.long_s:.1f} s: {mixed.shares}")
    return mixed


def _epochs(workload: Workload, data: Data, worth_s: float) -> int:
    """How many epochs an eager loop runs in about so many seconds."""
    step = plain_step(workload, Member(0, 1e-3), data)
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(100):
        step()
    torch.cuda.synchronize()
    return max(1, round(worth_s * 100 / (time.perf_counter() - started) / workload.epoch_steps))


def _eager(data: dict[str, Data], steps: dict[str, int]) -> float:
    """One after another. Both of a pair take as long, and a tenth of the steps a tenth: so much is run, the rest counted."""
    seconds = 0.0
    for name, own in data.items():
        step = plain_step(WORKLOADS[name], Member(0, 1e-3), own)
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        taken = max(1, steps[name] // 10)
        for _ in range(taken):
            step()
        torch.cuda.synchronize()
        seconds += 2 * (time.perf_counter() - started) * steps[name] / taken
    return seconds


def _captured(seed: int, name: str, data: Data, compiled: bool) -> Callable[[], None]:
    return captured_plain_step(WORKLOADS[name], Member(seed, 1e-3), data, compiled)


class _Threads:
    """A thread and a stream for each model; every 16 steps a thread waits for its stream."""

    def __init__(self, replays: Sequence[Callable[[], None]]) -> None:
        self._replays = replays
        self._streams = [torch.cuda.Stream() for _ in replays]

    def run(self, steps: Sequence[int]) -> float:
        def work(number: int) -> None:
            with torch.cuda.stream(self._streams[number]):
                for start in range(0, steps[number], 16):
                    for _ in range(min(16, steps[number] - start)):
                        self._replays[number]()
                    self._streams[number].synchronize()

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(self._replays))]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started


class _Shares:
    """Hears how much of the device's time each group had for each second it was open."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, GroupEnded) and event.seconds > 0:
            self.found[event.names[0]] = event.busy_s / event.seconds


def _ours(data: dict[str, Data], epochs: dict[str, int], device: str) -> tuple[float, dict[str, float]]:
    jobs = [
        carpool.Job(
            WORKLOADS[name].make,
            data=(data[name].x, data[name].y),
            name=f"{name}-{number}",
            loss=loss,
            metrics={"accuracy": accuracy},
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            batch_size=WORKLOADS[name].batch_size,
            epochs=epochs[name],
            seed=number,
        )
        for number, name in enumerate(MIX)
    ]
    shares = _Shares()
    started = time.perf_counter()
    results = carpool.train(jobs, device=device, reporters=[shares], compile=True)
    whole = time.perf_counter() - started
    for result in results:
        if result.error is not None:
            raise result.error
    return whole, shares.found
