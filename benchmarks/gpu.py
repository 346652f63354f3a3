"""The run on a GPU: four structures, carpool end to end beside steady peers, within a budget of seconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks import ours
from benchmarks.cpu import Size
from benchmarks.jax_worker import Jax
from benchmarks.peers_cuda import Steps, captured_step, plain_step, vmap_step
from benchmarks.record import Row
from benchmarks.windows import Way, measure
from benchmarks.workloads import WORKLOADS, sweep

WINDOW_S = 0.4  # of the steady peers; carpool's windows are whole calls
NOTES = (
    "carpool's figure is a whole warm call of `carpool.train`: jobs built, planned, the first step checked against every"
    " member alone, trained, results read. Its figure after opening leaves building, planning, opening and checking out.",
    "The peers' figures are steady ones: state, data and the order of the samples are already on the device.",
    "The eager loop trains one model; what its step takes does not depend on how many models follow.",
    "TF32 matrix products and convolutions in torch, JAX's default precision in JAX.",
    "A first call compiles its step anew (the compiler's cache starts empty); the first row also loads the compiler.",
)
SIZES = (  # one of each structure first: a run that is cut short has all four beside their peers
    Size("tiny", 256, 64),
    Size("mlp", 256, 24),
    Size("cnn", 16, 10),
    Size("tfm", 16, 10),
    Size("tiny", 16, 64),
    Size("tiny", 4096, 24),
    Size("mlp", 16, 96),
    Size("mlp", 1024, 8),
    Size("cnn", 64, 4),
    Size("tfm", 128, 3),
)
QUICK_SIZES = tuple(size for size in SIZES if size.members == 16)


@dataclass(frozen=True)
class Limits:
    """How long the run may take: windows of every way, of a peer's, and seconds for all rows together."""

    windows: int
    window_s: float
    budget_s: float


def allow_tf32() -> None:
    """TF32, as the peers' published figures have it. carpool itself never changes such a flag."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def settings(limits: Limits, compile: str | bool) -> dict[str, object]:
    """What a reader needs to know to repeat the run."""
    return {
        **asdict(limits),
        "compile": compile,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "jax_precision": "default",
        "xla_preallocate": False,
        "optimizer": "Adam, learning rates from 1e-4 to 1e-2",
        "samples": {size.workload: WORKLOADS[size.workload].samples for size in SIZES},
        "dtype": "float32",
    }


def run(
    sizes: Sequence[Size],
    limits: Limits,
    device: str,
    compile: str | bool,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """The rows, one by one; each gets its share of the seconds that are left."""
    end = clock() + limits.budget_s
    for number, size in enumerate(sizes):
        left = end - clock()
        if left <= 0:
            say(f"out of time: {len(sizes) - number} rows are left out")
            return
        share = left / (len(sizes) - number)
        say(f"{size.members} × {size.workload}: {share:.0f} s of {left:.0f} s")
        row = _row(size, limits, device, compile, clock() + share, clock)
        _give_back(device)
        say("  " + ", ".join(f"{one.way} {one.rate or 0:,.0f}" for one in row.measured))
        yield row


def _row(
    size: Size, limits: Limits, device: str, compile: str | bool, deadline: float, clock: Callable[[], float]
) -> Row:
    workload = WORKLOADS[size.workload]
    order = ours.Order(
        workload, sweep(size.members), workload.data().to(device), size.epochs, device, compile
    )
    measured = measure(_ways(order, limits.window_s), limits.windows, deadline=deadline, clock=clock)
    return Row(workload.name, workload.title, size.members, workload.batch_size, order.steps, measured)


def _ways(order: ours.Order, window_s: float) -> list[Way]:
    """In the order of what must not be missed when time runs out."""
    workload, members, data, device = order.workload, order.members, order.data, order.device

    def steps(name: str, count: int, make: Callable[[], Callable[[], None]]) -> Steps:
        return Steps(name, count, make, device, window_s)

    return [
        ours.Carpool(order),
        steps("eager loop", 1, lambda: plain_step(workload, members[0], data)),
        steps("vmap + compile + CUDA graph", len(members), lambda: captured_step(workload, members, data)),
        Jax(workload, members, data, device, window_s),
        steps("vmap, eager", len(members), lambda: vmap_step(workload, members, data)),
    ]


def _give_back(device: str) -> None:
    """What a row held: captured graphs, compiled steps and the memory behind them."""
    torch._dynamo.reset()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
