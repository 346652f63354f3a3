"""What bounds a model-step: the bytes and FLOPs that it cannot do without, over what this device reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.precision import computing_in
from benchmarks.record import Ceilings, Need
from benchmarks.workloads import Data, Workload, loss

_PASSES = 7  # Adam reads and writes the weights and two moments, and reads the gradients
_TRIES = 5
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}  # bytes; far more than a cache holds
_SIDE = {"cuda": 8192, "cpu": 1024}


def ceilings(device: str, precision: str) -> Ceilings:
    """The best of a few tries each, of a large copy and of a large product at the run's precision."""
    kind = torch.device(device).type
    source = torch.empty(_COPIED[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = _SIDE[kind]
    factor = torch.randn(side, side, device=device)
    factor = factor.bfloat16() if precision == "bf16" else factor
    return Ceilings(
        bytes_per_s=2 * _COPIED[kind] / _best(lambda: target.copy_(source), device),
        flops_per_s=2 * side**3 / _best(lambda: factor @ factor, device),
    )


def need(workload: Workload, data: Data) -> Need:
    """Of one model: weights, moments and gradients once each as Adam needs them, the batch, and the FLOPs of both passes."""
    model = workload.make().to(data.x.device)
    x, y = data.x[: workload.batch_size], data.y[: workload.batch_size]
    with FlopCounterMode(display=False) as counter:
        with computing_in(workload.precision, x.device.type):
            value = loss(model(x), y)
        value.backward()
    weights = sum(leaf.numel() * leaf.element_size() for leaf in model.parameters())
    batch = sum(part.numel() * part.element_size() for part in (x, y))
    return Need(_PASSES * weights + batch, counter.get_total_flops())


def _best(run: Callable[[], object], device: str) -> float:
    """Seconds of the fastest try; the first, which may prepare something, is left out."""
    seconds: list[float] = []
    for _ in range(_TRIES + 1):
        started = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
