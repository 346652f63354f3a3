"""The run on a GPU: five structures, carpool end to end beside steady peers, and cold calls, within a budget of seconds."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from benchmarks import cold, fidelity, floor, mix, ours
from benchmarks.jax_worker import Jax
from benchmarks.peers_cuda import Steps, captured_plain_step, captured_step, plain_step, repeated, vmap_step
from benchmarks.peers_together import COUNT, Processes, in_threads
from benchmarks.record import Cold, Fidelity, Mix, Report, Row
from benchmarks.report import is_whole
from benchmarks.sizes import ColdSize, MixSize, Setting, Size
from benchmarks.windows import Way, measure, measure_apart
from benchmarks.workloads import WORKLOADS, sampled, sweep

WINDOW_S = 0.4  # of the steady peers; carpool's windows are whole calls
SLACK = (
    1.4  # times what it is expected to, a row may take however many follow: a later run goes on with those
)
HEAVY = frozenset({("resnet", 32)})  # rows whose ways do not fit the memory side by side
IMAGES = frozenset({"resnet"})  # structures whose owner would try another layout
COMPARED = 2  # models whose weights are compared
Say = Callable[[str], None]
NOTES = (
    "carpool's figure is a whole warm call of `carpool.train`: jobs built, planned, the first step checked against"
    " members alone, trained, results read. Once open is the pace from chunk to chunk inside it, while all its groups have"
    " chunks under way; where a whole call takes long there are fewer calls than windows, and each is cut in parts.",
    "The peers' figures are steady ones: state, data and the order of the samples are already on the device.",
    "The eager loop and the compiled + captured one train one model: what its step takes does not depend on how many models follow."
    f" Threads and processes train {COUNT} models, in the narrowest row of a structure.",
    "A first call compiles its step anew (the compiler's cache starts empty); the compiler is loaded before the first row. First step: seconds"
    " of that call until its first steps were on their way.",
    "The floor is what the device cannot exceed: weights, moments and gradients once each as Adam needs them and the batch over the rate"
    " of a large copy, or the FLOPs over the rate of a large matrix product, both measured in this run at its precision.",
    "The mix: makespans leave the peers' building, compiling and capturing out. carpool's once open is what a call with twice the steps takes longer.",
    "The ways of 32 ResNets come one after another instead of in turns: together they do not fit the memory.",
    f"Weights are compared for {COMPARED} of the models with a plain eager loop at the same precision; in brackets, how far that loop is"
    " from itself in strict float32, which is what the precision makes of these models.",
)
SIZES = (
    Size("tiny", 16, 64, takes_s=45),
    Size("tiny", 256, 64, takes_s=60),
    Size("tiny", 4096, 24, calls=2, takes_s=75),
    Size("mlp", 1, 96, takes_s=25),
    Size("mlp", 16, 96, takes_s=45),
    Size("mlp", 256, 24, takes_s=60),
    Size("mlp", 1024, 8, calls=2, takes_s=85),
    Size("tfm", 1, 24, takes_s=30),
    Size("tfm", 16, 10, takes_s=85),
    Size("tfm", 128, 8, calls=2, takes_s=95),
    Size("cnn", 16, 10, takes_s=75),
    Size("cnn", 64, 8, calls=3, takes_s=75),
    Size("resnet", 8, 24, calls=3, takes_s=155),
    Size("resnet", 32, 8, calls=2, takes_s=200),
)
COLD = (
    ColdSize("mlp", 64, 1000, takes_s=45),
    ColdSize("tfm", 64, 1000, takes_s=75),
    ColdSize("mlp", 64, 100, takes_s=32),
    ColdSize("tfm", 64, 100, takes_s=40),
)
MIX = MixSize(worth_s=4.0)
QUICK_SIZES = tuple(size for size in SIZES if size.members in (8, 16))


@dataclass(frozen=True)
class Limits:
    """How long the run may take: windows of every way, of a peer's, and seconds for all rows together."""

    windows: int
    window_s: float
    budget_s: float


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


def remaining(report: Report, chosen: bool) -> list[Size | ColdSize | MixSize]:
    """What a report has not measured yet, then what it has only in part; a quick one has rows alone, unless they are chosen."""
    windows = report.settings.get("windows", 1)
    there = {(row.workload, row.members): is_whole(row, windows) for row in report.rows}
    cold = {(one.workload, one.steps): not one.note for one in report.cold}
    sizes = QUICK_SIZES if report.quick else SIZES
    wanted: list[tuple[Size | ColdSize | MixSize, bool | None]] = [
        (size, there.get((size.workload, size.members))) for size in sizes
    ]
    if chosen or not report.quick:
        wanted += [(size, cold.get((size.workload, size.steps))) for size in COLD]
        wanted += [(MIX, None if report.mix is None else True)]
    return [size for known in (None, False) for size, whole in wanted if whole is known]


def run(
    sizes: Sequence[Size | ColdSize | MixSize],
    limits: Limits,
    setting: Setting,
    say: Say = print,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row | Cold | Mix]:
    """What fits the seconds that are left, one by one; a row gets its share of them, or what it needs, if that is more."""
    end = clock() + limits.budget_s
    if setting.compile is True and sizes:
        torch.compile(torch.square)(torch.ones(8, device=setting.device))  # loads it
    for number, size in enumerate(sizes):
        left = end - clock()
        if left < size.takes_s:
            say(f"{size.title}: left out, {left:.0f} s of {size.takes_s:.0f}; --resume goes on with it")
            continue
        share = min(left, max(SLACK * size.takes_s, left / (len(sizes) - number)))
        say(f"{size.title}: {share:.0f} s of {left:.0f} s")
        if isinstance(size, MixSize):
            try:
                yield mix.run(size.worth_s, limits.windows, setting, clock() + share, clock, say)
            except Exception as error:  # a row's error is its note: nor does the mix's end the run
                say(f"  failed: {error}")
        elif isinstance(size, ColdSize):
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
    ways = _ways(order, size.calls, limits, together)
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


def _ways(order: ours.Order, calls: int | None, limits: Limits, together: bool) -> list[Way]:
    """In the order of what must not be missed when time runs out."""
    window_s = limits.window_s
    workload, members, data, device = order.workload, order.members, order.data, order.device
    first = members[0]
    captured = " + CUDA graph" if device.startswith("cuda") else ""  # on a CPU there is none to try

    def steps(name: str, count: int, make: Callable[[], Callable[[], None]]) -> Way:
        return Steps(name, count, lambda: repeated(make(), device), device, window_s)

    ways: list[Way] = [
        ours.Carpool(order, calls, math.ceil(limits.windows / calls) if calls else 1),
        steps("eager loop", 1, lambda: plain_step(workload, first, data)),
    ]
    if len(members) > 1:
        ways += [
            steps(f"vmap + compile{captured}", len(members), lambda: captured_step(workload, members, data)),
            Jax(workload, members, data, device, window_s),
            steps("vmap, eager", len(members), lambda: vmap_step(workload, members, data)),
        ]
    ways.append(steps(f"compiled{captured}", 1, lambda: captured_plain_step(workload, first, data)))
    if together and workload.name in IMAGES:
        innermost = partial(captured_plain_step, workload, first, data, innermost=True)
        ways.append(steps(f"compiled, channels innermost{captured}", 1, innermost))
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
