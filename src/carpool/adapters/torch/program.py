"""A step made ready to run: traced first (our random mode and vmap rules need that), compiled second, captured last.

Traced and compiled steps are remembered for the process by structure and shapes, so the second sweep of the same
models starts at once. A CUDA graph belongs to one session's buffers and is captured anew.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from carpool.adapters.torch import precision
from carpool.adapters.torch.bits import lowest
from carpool.adapters.torch.compiler import (
    Background,
    Cached,
    Request,
    compiled,
    is_begun,
    is_cached,
    mark,
    request,
)
from carpool.adapters.torch.faking import unlogged
from carpool.adapters.torch.launch import OutOfBounds, Resident
from carpool.adapters.torch.resident import Code
from carpool.adapters.torch.tracing import graph_of
from carpool.adapters.torch.tuning import timed_as_captured
from carpool.errors import described
from carpool.planning.trials import Form

Tensors = dict[str, Tensor]

STEPS_PER_GRAPH = (
    16  # gains 3 % over single steps at 256 tiny members; kernels, not launches, bound it from there
)
_REMEMBERED = 128
_MOST_NODES = 1 << 14  # operations of traces that are kept after a run: 3 kB each
_MOST_SHAPES = 1 << 12  # answers of torch about tensors without contents, of which it never drops one
# Cold compilation of a small network, measured on 2 cores and on an H200, and of each further operation: on the H200 a ResNet-18's 2,400 took 50 s.
_compile_guess_s = {"cpu": (6.0, 0.03), "cuda": (12.0, 0.018)}
_FIRST_S = 12.0  # more, of processor time, what is compiled first on a machine: 19.5 against 6.5 s of the demo's step, on 2 cores
_version = attrgetter("_version")
_SMALL_NODES = 200  # a small network's step, traced


@dataclass
class _Ready:
    """A traced step and, when it was compiled, the compiled one. `failed`: it could not be, or does not hold."""

    traced: GraphModule
    lowest: torch.dtype
    """The floating type in which it computes least precisely."""
    compiled: Callable[..., None] | None = None
    compiling: Background | Cached | None = None
    failed: bool = False
    too_long_s: float = 0.0
    """Processor seconds after which compiling was given up."""

    @property
    def best(self) -> Callable[..., None]:
        return (
            self.traced if self.compiled is None else self.compiled
        )  # `or` would ask a compiled module for its length

    def stop(self) -> None:
        if self.compiling is not None:
            self.compiling.close()
            self.compiling = None


_memory: OrderedDict[Hashable, _Ready] = OrderedDict()


_CACHED_S = 3.0  # of what was compiled before: mostly loading the compiler


def compile_guess_s(device: str, nodes: int = 0) -> float:
    """What compiling a step of so many operations is expected to take before one has been measured."""
    small_s, node_s = _compile_guess_s[torch.device(device).type]
    return small_s + node_s * max(0, nodes - _SMALL_NODES)


class Program:
    """One step bound to a session's tensors, panel by panel. `run` enqueues it; nothing waits."""

    def __init__(
        self,
        step: Callable[[Tensors], None],
        panels: Sequence[Tensors],
        key: Hashable,
        finish: Callable[[GraphModule], None] = lambda _: None,
        repeats: bool = True,
        is_late: bool = False,
    ) -> None:
        """`panels` are the tensors of each, of one shape; `finish` works over a step that was traced, once.

        `repeats`: captured, it gives the same bits each time. `is_late`: traced when it is first asked for.
        """
        self._panels, self._repeats = panels, repeats
        self._inputs = [list(tensors.values()) for tensors in panels]
        self._device = self._inputs[0][0].device
        tensors = panels[0]
        self.key = full = (key, _shapes(tensors), flags())
        """What it has baked in."""
        self._trace = lambda: _remembered(full, lambda: _trace(step, tensors, finish))
        self._taken: Callable[..., None] | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._begun: int | None = None
        self.at = 0
        """The panel that runs, or ran last."""
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self.resident: Resident | None = None
        """Its steps as machine code, once it runs so."""
        self.short: dict[int, int] = {}
        """Rows of the panel that raised which took fewer steps of the launch than the others, and how many."""
        self.prepare_s = 0.0
        if not is_late:
            self._call  # noqa: B018  # traces it

    @cached_property
    def _ready(self) -> _Ready:
        started = time.perf_counter()
        found = self._trace()
        self.prepare_s += time.perf_counter() - started
        return found

    @property
    def _call(self) -> Callable[..., None]:
        """What a step calls: the best there was when it was first asked for, until another is adopted."""
        if self._taken is None:
            self._taken = self._ready.best
        return self._taken

    @_call.setter
    def _call(self, call: Callable[..., None]) -> None:
        self._taken = call

    @property
    def compiled(self) -> bool:
        return self._call is self._ready.compiled

    @property
    def form(self) -> Form:
        """How it runs."""
        if self.resident is not None:
            return "resident"
        return "compiled" if self.compiled else "traced"

    def made_resident(self, code: Code, threads: Callable[[], int], step_s: float = 0.0) -> Resident:
        """Its steps as machine code, timed unless it is known what a step takes. Raises what making it raises."""
        started = time.perf_counter()
        try:
            made = Resident(code, self._panels, threads)
            made.step_s = step_s or made.launch_s()
            return made
        finally:
            self.prepare_s += time.perf_counter() - started

    @property
    def lowest(self) -> torch.dtype:
        """The floating type in which the step computes least precisely."""
        return self.resident.code.lowest if self.resident is not None else self._ready.lowest

    def stay_traced(self) -> None:
        """Runs as it was traced, whoever had it compiled."""
        self._call = self._ready.traced

    def compiling_guess_s(self) -> float:
        """What compiling is expected to take."""
        if is_cached(self._request()):
            return _CACHED_S
        first_s = 0.0 if is_begun() else _FIRST_S
        return max(first_s + compile_guess_s(str(self._device), self.nodes), 2 * self._ready.too_long_s)

    @property
    def nodes(self) -> int:
        """How many operations the traced step has: an unrolled recurrence has many."""
        return len(self._ready.traced.graph.nodes)

    def compile(self) -> None:
        """Compiles the traced step; where the compiler is missing or fails, the traced step stays."""
        started = time.perf_counter()
        self._ready.stop()
        if self._ready.compiled is None and not self._ready.failed:
            try:
                asked = self._request()
                candidate = compiled(asked)
                with timed_as_captured(self._device):
                    self._idle(candidate)
                self._ready.compiled = candidate
                mark(asked)
            except Exception as error:
                self._give_up(described(error))
        self._adopt()
        self.prepare_s += time.perf_counter() - started

    def begin_compiling(self, budget_s: float = math.inf) -> None:
        """Begins to compile in the background; the traced step runs meanwhile. On a CPU it may take so many processor seconds."""
        if self._ready.compiled is None and self._ready.compiling is None and not self._ready.failed:
            asked = self._request()
            most_s = budget_s if self._device.type == "cpu" else math.inf
            self._ready.compiling = Cached() if is_cached(asked) else Background(asked, most_s)

    @property
    def is_compiling(self) -> bool:
        """Whether compiling goes on in the background, or another session's is through and was not taken up here."""
        if self.resident is not None:
            return False
        return self._ready.compiling is not None or self._call is not self._ready.best

    def take_compiled(self, wait: bool = False) -> bool:
        """Takes up the compiled step if it is there by now; whether the next launch is another than the last one."""
        background = self._ready.compiling
        if background is not None:
            code = background.wait() if wait else background.poll()
            if code is None:
                if background.is_over:
                    self._ready.too_long_s = background.spent_s
                    self._ready.stop()
                return False
            if code:
                self._give_up(background.told())
                self._ready.stop()
        before = self._call
        if self._ready.failed:
            self._adopt()  # another session may have found that it does not hold
        elif background is not None or before is not self._ready.best:
            self.compile()
        return self.compiled and self._call is not before

    def take_back(self, reason: str) -> None:
        """The compiled step does not hold: the traced one goes on."""
        self._give_up(reason)
        self._adopt()

    def _request(self) -> Request:
        return request(self._ready.traced, self._inputs[0])

    def _give_up(self, reason: str) -> None:
        self._ready.failed, self._ready.compiled = True, None
        warnings.warn(
            f"carpool: compiling failed, so the step runs uncompiled ({reason[:300]})", stacklevel=3
        )

    def _adopt(self) -> None:
        if self._call is self._ready.best:
            return
        if self._graphs:  # what is in flight runs on memory that goes with them
            torch.cuda.current_stream().synchronize()
        self._call, self._graphs = self._ready.best, {}

    def launch_s(self) -> float:
        """Seconds one launch takes now, measured on idle rows: nothing changes.

        Each panel is timed when it has just run, and is in the cache, as it is at all steps of a chunk but the first.
        """
        if self.resident is not None:
            return self.resident.launch_s()
        call = self._call if self._device.type != "cuda" else lambda *_: self._graph(1).replay()
        taken: list[float] = []

        def timed(*inputs: Tensor) -> None:
            self._finish()
            started = time.perf_counter()
            call(*inputs)
            self._finish()
            taken.append(time.perf_counter() - started)

        self._idle(timed, times=2)
        return sum(taken[1::2])

    def run(self, steps: int) -> None:
        """Enqueues so many steps."""
        if self._device.type != "cuda":
            with torch.autocast(self._device.type, enabled=False):  # the trace holds every cast already
                self._run_here(steps)
            return
        for size in (STEPS_PER_GRAPH, 1):
            while steps >= size:
                self._graph(size).replay()
                steps -= size

    def _run_here(self, steps: int) -> None:
        """Panel after panel. Of several, one in which no row is active would keep every bit, and is left out."""
        for number, (tensors, inputs) in enumerate(zip(self._panels, self._inputs, strict=True)):
            if len(self._panels) > 1 and not tensors["active"].any():
                continue
            self.at = number
            if self.resident is not None:
                self._run_resident(self.resident, number, steps)
                continue
            for _ in range(steps):
                self._begun = self._writes()
                self._call(*inputs)
        self._begun = None

    def _run_resident(self, resident: Resident, panel: int, steps: int) -> None:
        self.short = {}
        try:
            resident.run(panel, steps)
        except OutOfBounds as error:
            self.short = error.steps
            raise

    def capture(self, steps: int) -> None:
        """Captures what so many steps take, on a device that captures; that runs a step with no row active."""
        for size in _sizes(steps) if self._device.type == "cuda" else ():
            self._graph(size)

    def captured(self, steps: int) -> bool:
        """Whether nothing is left to be captured for so many steps."""
        return self._device.type != "cuda" or all(size in self._graphs for size in _sizes(steps))

    def whole(self) -> bool:
        """Whether a launch that raised had written nothing yet. A captured one allocates, and raises, before it runs."""
        return self._begun is None or self._begun == self._writes()

    def _writes(self) -> int:
        return sum(map(_version, self._inputs[self.at]))

    def _graph(self, steps: int) -> torch.cuda.CUDAGraph:
        if steps not in self._graphs:
            started = time.perf_counter()
            self._graphs[steps] = self._captured(steps)
            self.prepare_s += time.perf_counter() - started
        return self._graphs[steps]

    def _captured(self, steps: int) -> torch.cuda.CUDAGraph:
        self._idle(self._call)  # what is set up at a first call must not be captured
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy batches meanwhile. Replays of one program follow one another, so they share a pool. Captured on
        # torch's own stream for that, all sessions' graphs would share cuBLAS's workspace, and they replay at the same time.
        stream = torch.cuda.current_stream()
        own = None if stream == torch.cuda.default_stream() else stream
        capture = torch.cuda.graph(graph, self._pool, own, capture_error_mode="thread_local")
        with torch.autocast("cuda", enabled=False), reproducible(self._repeats), capture:
            for inputs in self._inputs:
                for _ in range(steps):
                    self._call(*inputs)
        return graph

    def _idle(self, call: Callable[..., None], times: int = 1) -> None:
        """Runs a step of each panel, so many times, in which no row is active, on the first samples of its orders, then puts back what it was told: the stack keeps every bit."""
        told = [
            tensors[name] for tensors in self._panels for name in ("active", "k", "first") if name in tensors
        ]
        before = [tensor.clone() for tensor in told]
        for tensors in self._panels:
            tensors["active"].zero_()
            if "first" in tensors:  # where a row's order begins: a batch of any size has room there
                tensors["first"].sub_(tensors["first"] % tensors["order"].shape[1])
        try:
            with torch.autocast(self._device.type, enabled=False), reproducible(self._repeats):
                for tensors, inputs in zip(self._panels, self._inputs, strict=True):
                    for _ in range(times):
                        tensors["k"].zero_()
                        call(*inputs)
            self._finish()
        finally:
            for tensor, held in zip(told, before, strict=True):
                tensor.copy_(held)

    def _finish(self) -> None:
        """Waits for the device, where there is something to wait for."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def end_run() -> None:
    """Nothing is compiled in the background any more, for whomever it was, and little of what was traced is kept."""
    kept = list(_memory.values())
    for ready in kept:
        ready.stop()
    nodes = sum(map(_size, kept))
    while nodes > _MOST_NODES and len(_memory) > 1:
        nodes -= _size(_memory.popitem(last=False)[1])
    if FakeTensorMode.cache_info().size > _MOST_SHAPES:
        FakeTensorMode.cache_clear()


def _size(ready: _Ready) -> int:
    return len(ready.traced.graph.nodes)


def _trace(
    step: Callable[[Tensors], None], tensors: Tensors, finish: Callable[[GraphModule], None]
) -> _Ready:
    names = list(tensors)

    def flat(*inputs: Tensor) -> None:
        step(dict(zip(names, inputs, strict=True)))

    with unlogged():
        traced = graph_of(flat, *tensors.values())
    traced.graph.eliminate_dead_code()
    finish(traced)
    traced.recompile()
    return _Ready(traced, lowest(traced.graph, names))


@contextmanager
def reproducible(wanted: bool = True) -> Iterator[None]:
    """Inside, if that is wanted, cuDNN takes kernels that give the same bits each time; others differ by an order of additions."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = wanted or before
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _sizes(steps: int) -> list[int]:
    whole, rest = divmod(steps, STEPS_PER_GRAPH)
    return [STEPS_PER_GRAPH] * bool(whole) + [1] * bool(rest)


def trace_only(
    step: Callable[[Tensors], None],
    tensors: Tensors,
    key: Hashable,
    finish: Callable[[GraphModule], None] = lambda _: None,
) -> GraphModule:
    """Traces a step and remembers it; raises what tracing raises."""
    return _remembered((key, _shapes(tensors), flags()), lambda: _trace(step, tensors, finish)).traced


def _remembered(key: Hashable, make: Callable[[], _Ready]) -> _Ready:
    ready = _memory.pop(key, None)
    _memory[key] = ready = (
        make() if ready is None else ready
    )  # a run in another thread may drop it at any time
    while len(_memory) > _REMEMBERED:
        _memory.popitem(last=False)
    return ready


def _shapes(tensors: Tensors) -> Hashable:
    return tuple((name, tuple(t.shape), t.dtype, str(t.device)) for name, t in tensors.items())


def flags() -> Hashable:
    """Global settings that a compiled step has baked in."""
    return (
        precision.settings(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )
