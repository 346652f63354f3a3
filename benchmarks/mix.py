"""Eight different models together on one GPU, two of each structure, a fixed number of steps each.

The peers' makespans leave out building, compiling and capturing; carpool's is given as a whole call, and as what a call with twice the steps
takes longer, which leaves that out too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

import carpool
from benchmarks import ours
from benchmarks.peers_cuda import captured_plain_step, plain_step, repeated
from benchmarks.record import OURS, Mix
from benchmarks.sizes import Setting
from benchmarks.windows import timed
from benchmarks.workloads import WORKLOADS, Data, Member, Workload

MIX = ("tiny", "mlp", "cnn", "tfm") * 2
WHOLE, OPEN = f"{OURS}, whole call", f"{OURS}, once open"
GRAPHS, COMPILED = "threads + CUDA graphs", "threads + compiled CUDA graphs"


def run(
    worth_s: float,
    windows: int,
    setting: Setting,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = print,
) -> Mix:
    """All ways in turns, window by window; past the deadline no further one begins. What an eager loop does in so many seconds is what each model trains."""
    device, compile, word = setting.device, setting.compile, setting.precision
    workloads = {name: replace(WORKLOADS[name], precision=word) for name in dict.fromkeys(MIX)}
    parts = [_Part(workloads[name], workloads[name].data().to(device)) for name in workloads]
    epochs = [part.epochs(worth_s) for part in parts]
    steps = {p.workload.name: count * p.workload.epoch_steps for p, count in zip(parts, epochs, strict=True)}
    say(f"  steps each: {steps}")
    ways: dict[str, Callable[[], float]] = {GRAPHS: _Threads(parts, list(steps.values()), device, False)}
    if compile is True:
        ways[COMPILED] = _Threads(parts, list(steps.values()), device, True)
    first_s = _ours(parts, epochs, device, compile)
    eager: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in (*ways, WHOLE, OPEN)}
    for number in range(windows):
        if number and clock() > deadline:
            break
        eager.append(sum(part.eager_s(own) for part, own in zip(parts, steps.values(), strict=True)))
        for name, way in ways.items():
            found[name].append(way())
        once = _ours(parts, epochs, device, compile)
        twice = _ours(parts, [2 * count for count in epochs], device, compile)
        found[WHOLE].append(once)
        found[OPEN].append(twice - once)
        say("  " + ", ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in found.items()))
    return Mix(steps, tuple(eager), {name: tuple(seconds) for name, seconds in found.items()}, first_s)


@dataclass(frozen=True)
class _Part:
    """A structure of the mix, of which there are two models."""

    workload: Workload
    data: Data

    def epochs(self, worth_s: float) -> int:
        """How many epochs an eager loop runs in about so many seconds."""
        take = self._eager()
        take(20)
        seconds = timed(lambda: take(100)).seconds
        return max(1, round(worth_s * 100 / seconds / self.workload.epoch_steps))

    def eager_s(self, steps: int) -> float:
        """One after the other. Both take as long, and a tenth of the steps a tenth: so much is run, the rest counted."""
        take, taken = self._eager(), max(1, steps // 10)
        take(5)
        return 2 * timed(lambda: take(taken)).seconds * steps / taken

    def _eager(self) -> Callable[[int], int]:
        run = repeated(plain_step(self.workload, Member(0, 1e-3), self.data), str(self.data.x.device))

        def take(steps: int) -> int:
            run(steps)
            return steps

        return take


class _Threads:
    """A thread and a stream for each model; every 16 steps a thread waits for its stream."""

    def __init__(self, parts: Sequence[_Part], steps: Sequence[int], device: str, compiled: bool) -> None:
        self._steps = [*steps, *steps]
        self._replays = [
            captured_plain_step(part.workload, Member(seed, 1e-3), part.data, compiled)
            for seed, part in enumerate([*parts, *parts])
        ]
        self._streams = [torch.cuda.Stream() if device.startswith("cuda") else None for _ in self._replays]

    def __call__(self) -> float:
        threads = [threading.Thread(target=self._work, args=(place,)) for place in range(len(self._steps))]

        def run() -> int:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sum(self._steps)

        return timed(run).seconds

    def _work(self, place: int) -> None:
        stream, steps = self._streams[place], self._steps[place]
        with torch.cuda.stream(stream):
            for start in range(0, steps, 16):
                for _ in range(min(16, steps - start)):
                    self._replays[place]()
                if stream is not None:
                    stream.synchronize()


def _ours(parts: Sequence[_Part], epochs: Sequence[int], device: str, compile: str | bool) -> float:
    orders = [
        ours.Order(
            part.workload, (Member(seed, 1e-3), Member(seed + len(parts), 1e-3)), part.data, own, device
        )
        for seed, (part, own) in enumerate(zip(parts, epochs, strict=True))
    ]
    jobs = [job for order in orders for job in ours.jobs(order)]
    started = time.perf_counter()
    results = carpool.train(jobs, device=device, reporters=[], compile=compile)
    seconds = time.perf_counter() - started
    for result in results:
        if result.error is not None:
            raise result.error
    return seconds
