"""What panels gain: stacks on a CPU in parts that stay in the processor's cache, beside the same in one part.

`python -m benchmarks panels`. Calls of two lengths: what a call costs once is in both. The two ways alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

import carpool
from benchmarks.ours import Order, jobs
from benchmarks.workloads import WORKLOADS, Workload, sweep
from carpool.adapters.torch import panels

_real = panels.num_panels


@dataclass(frozen=True)
class Size:
    """So many models, in calls of one epoch and of so many more."""

    workload: Workload
    members: int
    epochs: int


SIZES = (
    Size(WORKLOADS["small-mlp"], 512, 20),
    Size(replace(WORKLOADS["mlp"], samples=1024), 64, 4),
    Size(WORKLOADS["small-cnn"], 16, 4),
)


def run(windows: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Microseconds of a member's step, by structure, whether it was compiled, and in how many panels: the median window's."""
    found: dict[str, dict[str, float]] = {}
    for size in SIZES:
        for compile in (True, False):
            word = f"{size.members} × {size.workload.title}, {'compiled' if compile else 'uncompiled'}"
            found[word] = _compared(size, compile, windows)
            say(f"{word}: {found[word]}")
    settings = {"windows": windows, "torch_threads": torch.get_num_threads()}
    return {"settings": settings, "scores": found}


def _compared(size: Size, compile: bool, windows: int) -> dict[str, float]:
    with _cut(_real) as counts:
        _seconds(size, compile, 1)  # compiles, and warms up
    with _cut(lambda *_: 1):
        _seconds(size, compile, 1)
    ways = {"1 panel": lambda *_: 1, f"{counts.pop()} panels": _real}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(windows):
        for way, rule in ways.items():
            with _cut(rule):
                short_s, long_s = (_seconds(size, compile, epochs) for epochs in (1, 1 + size.epochs))
            steps = size.epochs * size.workload.epoch_steps * size.members
            taken[way].append(1e6 * (long_s - short_s) / steps)
    return {way: round(statistics.median(values), 2) for way, values in taken.items()}


@contextmanager
def _cut(rule: Callable[..., int]) -> Iterator[set[int]]:
    """Inside, stacks are cut by this rule; into how many panels they were."""
    counts: set[int] = set()

    def noted(width: int, *sizes: int) -> int:
        counts.add(rule(width, *sizes))
        return rule(width, *sizes)

    panels.num_panels = noted
    try:
        yield counts
    finally:
        panels.num_panels = _real


def _seconds(size: Size, compile: bool, epochs: int) -> float:
    order = Order(size.workload, sweep(size.members), size.workload.data(), epochs, compile=compile)
    made = jobs(order)
    started = time.perf_counter()
    results = carpool.train(made, device="cpu", reporters=[], compile=compile, strategy="fused")
    seconds = time.perf_counter() - started
    if wrong := [result for result in results if result.steps != order.steps]:
        raise RuntimeError(f"expected {order.steps} steps, got {wrong[0].steps}") from wrong[0].error
    return seconds
