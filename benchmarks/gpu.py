"""The run on a GPU: five structures, carpool end to end beside steady peers, and cold calls, within a budget of seconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks import cold, fidelity, floor, ours
from benchmarks.cold import ColdSize
from benchmarks.cpu import Size
from benchmarks.jax_worker import Jax
from benchmarks.peers_cuda import Steps, captured_plain_step, captured_step, plain_step, repeated, vmap_step
from benchmarks.peers_together import COUNT, Processes, in_threads
from benchmarks.record import Cold, Fidelity, Report, Row
from benchmarks.windows import Way, measure, measure_apart
from benchmarks.workloads import WORKLOADS, sampled, sweep

WINDOW_S = 0.4  # of the steady peers; carpool's windows are whole calls
ROW_S = {"resnet": 200.0}  # what a row may take however many follow: a later run goes on with those
OTHER_ROW_S = 90.0
LEAST_S = 15.0  # with less left no row begins
HEAVY = frozenset({("resnet", 32)})  # rows whose ways do not fit the memory side by side
COMPARED = 2  # models whose weights are compared
Say = Callable[[str], None]
NOTES = (
    "carpool's figure is a whole warm call of `carpool.train`: jobs built, planned, the first step checked against"
    " members alone, trained, results read. Once open is the pace from chunk to chunk inside it, once all its groups are open; of calls of fewer than"
    " eight epochs, from the first check to the last epoch's end.",
    "The peers' figures are steady ones: state, data and the order of the samples are already on the device.",
    "The eager loop and the compiled + captured one train one model: what its step takes does not depend on how many models follow."
    f" Threads and processes train {COUNT} models, in the narrowest row of a structure.",
    "A first call compiles its step anew (the compiler's cache starts empty); the first row also loads the compiler. First step: seconds"
    " of that call until its first steps were on their way.",
    "The floor is what the device cannot exceed: weights, moments and gradients once each as Adam needs them and the batch over the rate"
    " of a large copy, or the FLOPs over the rate of a large matrix product, both measured in this run at its precision.",
    "The ways of 32 ResNets come one after another instead of in turns: together they do not fit the memory.",
    f"Weights are compared for {COMPARED} of the models with a plain eager loop at the same precision; in brackets, how far that loop is"
    " from itself in strict float32, which is what the precision makes of these models.",
)
SIZES = (  # one of each structure first: a run that is cut short has all of them beside their peers
    Size("tiny", 256, 64),
    Size("mlp", 256, 24),
    Size("cnn", 16, 10),
    Size("tfm", 16, 10),
    Size("resnet", 8, 24),
    Size("tiny", 4096, 24),
    Size("tiny", 16, 64),
    Size("mlp", 16, 96),
    Size("mlp", 1024, 8),
    Size("cnn", 64, 8),
    Size("tfm", 128, 8),
    Size("resnet", 32, 8),
    Size("mlp", 1, 96),
    Size("tfm", 1, 24),
)
COLD = (
    ColdSize("mlp", 64, 1000),
    ColdSize("tfm", 64, 1000),
    ColdSize("mlp", 64, 100),
    ColdSize("tfm", 64, 100),
)
QUICK_SIZES = tuple(size for size in SIZES if size.members in (8, 16))


@dataclass(frozen=True)
class Limits:
    """How long the run may take: windows of every way, of a peer's, and seconds for all rows together."""

    windows: int
    window_s: float
    budget_s: float


@dataclass(frozen=True)
class Setting:
    """Where and how a run computes."""

    device: str
    compile: str | bool
    precision: str


def settings(limits: Limits, setting: Setting) -> dict[str, object]:
    """What a reader needs to know to repeat the run."""
    return {
        **asdict(limits),
        "precision": setting.precision,
        "compile": setting.compile,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "jax_precision": {"tf32": "default", "fp32": "highest"}.get(setting.precision, "bfloat16 by hand"),
        "xla_preallocate": False,
        "optimizer": "Adam, learning rates from 1e-4 to 1e-2",
        "samples": {size.workload: WORKLOADS[size.workload].samples for size in SIZES},
    }


def remaining(report: Report, chosen: bool) -> list[Size | ColdSize]:
    """What a report has not measured yet; a quick one has no cold calls, unless rows are chosen."""
    there = {(row.workload, row.members) for row in report.rows}
    cold = {(one.workload, one.steps) for one in report.cold}
    sizes = [
        size
        for size in (QUICK_SIZES if report.quick else SIZES)
        if (size.workload, size.members) not in there
    ]
    calls = [size for size in COLD if (size.workload, size.steps) not in cold]
    return [*sizes, *(calls if chosen or not report.quick else ())]


def run(
    sizes: Sequence[Size | ColdSize],
    limits: Limits,
    setting: Setting,
    say: Say = print,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row | Cold]:
    """The rows, one by one; each gets its share of the seconds that are left, or what a row needs, if that is more."""
    end = clock() + limits.budget_s
    for number, size in enumerate(sizes):
        left = end - clock()
        if left < LEAST_S:
            say(f"out of time: {len(sizes) - number} rows are left out; --resume goes on with them")
            return
        least = ROW_S.get(size.workload, OTHER_ROW_S)
        share = min(left, max(least, left / (len(sizes) - number)))
        say(f"{size.members} × {size.workload}: {share:.0f} s of {left:.0f} s")
        if isinstance(size, ColdSize):
            yield cold.measure(size, setting.device, setting.precision, left, say)
        else:
            row = _row(size, limits, setting, clock() + share, clock, say)
            say("  " + ", ".join(f"{one.way} {one.rate or 0:,.0f}" for one in row.measured))
            yield row
        _give_back(setting.device)


def _row(
    size: Size, limits: Limits, setting: Setting, deadline: float, clock: Callable[[], float], say: Say
) -> Row:
    workload = replace(WORKLOADS[size.workload], precision=setting.precision)
    data = workload.data().to(setting.device)
    order = ours.Order(workload, sweep(size.members), data, size.epochs, setting.device, setting.compile)
    together = size.members > 1 and size.members == _narrowest(size.workload)
    ways = _ways(order, limits.window_s, together)
    if (size.workload, size.members) in HEAVY:
        measured = measure_apart(
            ways, limits.windows, lambda: _give_back(setting.device), deadline=deadline, clock=clock
        )
    else:
        measured = measure(ways, limits.windows, deadline=deadline, clock=clock)
    return Row(
        workload=workload.name,
        title=workload.title,
        members=size.members,
        batch_size=workload.batch_size,
        steps=order.steps,
        measured=measured,
        fidelity=_compared(order, say),
        need=floor.need(workload, data),
    )


def _narrowest(workload: str) -> int:
    """How many members the narrowest row of a structure has, one job alone left aside."""
    return min((size.members for size in SIZES if size.workload == workload and size.members > 1), default=1)


def _compared(order: ours.Order, say: Say) -> Fidelity | None:
    """A row whose weights cannot be compared is still one that was timed."""
    try:
        return fidelity.compare(order, COMPARED)
    except Exception as error:
        say(f"  weights were not compared: {type(error).__name__}: {error}"[:300])
        return None


def _ways(order: ours.Order, window_s: float, together: bool) -> list[Way]:
    """In the order of what must not be missed when time runs out."""
    workload, members, data, device = order.workload, order.members, order.data, order.device
    first = members[0]
    captured = " + CUDA graph" if device.startswith("cuda") else ""  # on a CPU there is none to try

    def steps(name: str, count: int, make: Callable[[], Callable[[], None]]) -> Way:
        return Steps(name, count, lambda: repeated(make(), device), device, window_s)

    ways: list[Way] = [
        ours.Carpool(order),
        steps("eager loop", 1, lambda: plain_step(workload, first, data)),
    ]
    if len(members) > 1:
        ways += [
            steps(f"vmap + compile{captured}", len(members), lambda: captured_step(workload, members, data)),
            Jax(workload, members, data, device, window_s),
            steps("vmap, eager", len(members), lambda: vmap_step(workload, members, data)),
        ]
    ways.append(steps(f"compiled{captured}", 1, lambda: captured_plain_step(workload, first, data)))
    if together:
        few = sampled(members, COUNT)
        ways += [
            Steps("threads", len(few), lambda: in_threads(workload, few, data), device, window_s),
            Processes(workload, few, device, window_s),
            Processes(workload, few, device, window_s, mps=True),
        ]
    return ways


def _give_back(device: str) -> None:
    """What a row held: captured graphs, compiled steps and the memory behind them."""
    torch._dynamo.reset()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
