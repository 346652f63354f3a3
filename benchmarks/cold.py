"""Cold calls: a whole sweep by `carpool.train` in a fresh process, beside one model after another in an eager loop in another.

`python -m benchmarks.cold` is that process. Its time runs from the call of `carpool.train` to its return, or from the first model
of the loop: importing torch and starting CUDA are left out, loading compilers (torch loads most of one for its first optimizer, in
an eager loop too) and compiling are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import carpool
from benchmarks import ours, precision
from benchmarks.caches import EVERYONE, variables
from benchmarks.pace import FirstStep
from benchmarks.peers_cuda import plain_step, repeated
from benchmarks.record import Cold, ColdCall
from benchmarks.sizes import ColdSize
from benchmarks.workloads import WORKLOADS, Workload, sweep

EPOCH_STEPS = 50
ROOT = Path(__file__).parents[1]


def measure(
    size: ColdSize, device: str, word: str, timeout_s: float, say: Callable[[str], None] = print
) -> Cold:
    """A process with every cache empty, a second with what the first left behind, and one with a sample of the eager loop."""
    workload = _workload(size, word)
    made = Cold(size.workload, workload.title, size.members, size.steps)
    end = time.perf_counter() + timeout_s
    try:
        with tempfile.TemporaryDirectory(prefix="benchmarks-cold-", ignore_cleanup_errors=True) as folder:
            made = replace(made, first=ColdCall(**_told(size, device, word, folder, end)))
            made = replace(made, again=ColdCall(**_told(size, device, word, folder, end)))
            sample = Sample(**_told(size, device, word, folder, end, "--eager"))
            made = replace(made, eager_s=sample.counted_up(size), eager_steps=size.steps)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        made = replace(made, note=_said(error))
    say(f"  first {made.first}, again {made.again}, eager {made.eager_s or 0:.1f} s {made.note}")
    return made


def _workload(size: ColdSize, word: str) -> Workload:
    """With so few samples that the steps are whole epochs."""
    found = WORKLOADS[size.workload]
    return replace(found, precision=word, samples=found.batch_size * min(EPOCH_STEPS, size.steps))


def _told(size: ColdSize, device: str, word: str, folder: str, end: float, *how: str) -> dict[str, Any]:
    """What the fresh process says last."""
    line = [sys.executable, "-m", "benchmarks.cold", size.workload, str(size.members), str(size.steps), *how]
    ended = subprocess.run(
        [*line, "--device", device, "--precision", word, "--threads", str(torch.get_num_threads())],
        env={**os.environ, **variables(folder, EVERYONE)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=max(1.0, end - time.perf_counter()),
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


def _said(error: Exception) -> str:
    lines = (getattr(error, "stderr", None) or "").strip().splitlines()
    return f"failed: {lines[-1] if lines else error}"[:300]


@dataclass(frozen=True)
class Sample:
    """All steps of a fresh process's first model in an eager loop, and of its second: what is loaded once is in the first alone."""

    first_s: float
    next_s: float

    def counted_up(self, size: ColdSize) -> float:
        """Seconds of all models.

        >>> Sample(first_s=3.0, next_s=0.5).counted_up(ColdSize("mlp", 64, 100))
        34.5
        """
        return self.first_s + self.next_s * (size.members - 1)


def eager(size: ColdSize, device: str, word: str) -> Sample:
    """What the fresh process does for the eager loop."""
    precision.allow(word)
    workload = _workload(size, word)
    data = workload.data().to(device)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    marks = [time.perf_counter()]
    for member in sweep(2):
        repeated(plain_step(workload, member, data), device)(size.steps)
        marks.append(time.perf_counter())
    return Sample(marks[1] - marks[0], marks[2] - marks[1])


def call(size: ColdSize, device: str, word: str) -> ColdCall:
    """What the fresh process does."""
    precision.allow(word)
    workload = _workload(size, word)
    data = workload.data().to(device)
    epochs = size.steps // workload.epoch_steps
    order = ours.Order(workload, sweep(size.members), data, epochs, device, compile="auto")
    jobs = ours.jobs(order)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    started, first = time.perf_counter(), FirstStep()
    results = carpool.train(jobs, device=device, reporters=[first])
    seconds = time.perf_counter() - started
    for result in results:
        if result.error is not None:
            raise result.error
    if first.seconds is None or sum(result.steps for result in results) != size.members * size.steps:
        raise RuntimeError(f"expected {size.steps} steps each, got {[result.steps for result in results]}")
    return ColdCall(first.seconds, seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold", description="One cold call.")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("members", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=precision.PRECISIONS, default="tf32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="two models in an eager loop instead")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    does = eager if options.eager else call
    made = does(ColdSize(options.workload, options.members, options.steps), options.device, options.precision)
    print(json.dumps(asdict(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
