"""What an epoch costs the host: many jobs with so little data that an epoch is four steps of a linear layer.

`python -m benchmarks epochs`. Processor time on one thread, of calls of two lengths: what a call costs once is in both. On a CPU the steps
themselves are in it; on a GPU it is what the device waits for wherever its own work is shorter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import carpool

MEMBERS = (1, 8, 64, 512)
SHORT, LONG = 20, 220
STEPS, BATCH_SIZE = 4, 32


def run(device: str, windows: int, compile: str | bool, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Microseconds of an epoch, by members and whether they are validated: the median window's."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for members in MEMBERS:
        for validated in (False, True):
            word = f"{members} jobs" + (", validated" if validated else "")
            _seconds(members, validated, 2, device, compile)  # compiles, and warms up
            epochs = [_epoch_s(members, validated, device, compile) for _ in range(windows)]
            found[word] = round(statistics.median(epochs) * 1e6)
            say(f"{word}: {found[word]} us an epoch of {STEPS} steps")
    return {"settings": {"windows": windows, "compile": compile, "threads": 1}, "scores": found}


def _epoch_s(members: int, validated: bool, device: str, compile: str | bool) -> float:
    short, long = (_seconds(members, validated, epochs, device, compile) for epochs in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


def _seconds(members: int, validated: bool, epochs: int, device: str, compile: str | bool) -> float:
    """Processor time of a whole call."""
    jobs = [_job(seed, validated, epochs) for seed in range(members)]
    started = time.process_time()
    results = carpool.train(jobs, device=device, reporters=[], compile=compile)
    seconds = time.process_time() - started
    if wrong := [result for result in results if result.steps != epochs * STEPS]:
        raise RuntimeError(
            f"expected {epochs * STEPS} steps, got {wrong[0].steps} of {wrong[0].name}"
        ) from wrong[0].error
    return seconds


def _job(seed: int, validated: bool, epochs: int) -> carpool.Job:
    return carpool.Job(
        partial(torch.nn.Linear, 8, 4),
        (_X, _Y),
        name=f"linear-{seed}",
        validation_data=(_X, _Y) if validated else None,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        batch_size=BATCH_SIZE,
        epochs=epochs,
        seed=seed,
    )


_X = torch.randn(STEPS * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(0))
_Y = torch.arange(len(_X)) % 4
