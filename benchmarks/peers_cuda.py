"""Steady peers on a GPU: state and data stay on the device, and a window is nothing but steps.

That flatters them: carpool's windows beside them are whole calls, with models built, checked and read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.peers_torch import Stacked, eager_step, seeded
from benchmarks.precision import computing_in
from benchmarks.record import Measured, Window
from benchmarks.windows import Way, timed
from benchmarks.workloads import Data, Member, Workload, accuracy, loss

Step = Callable[[], None]
Run = Callable[[int], None]  # so many steps of every model, and then waits for the device


class Steps(Way):
    """Windows of so many steps that one lasts `window_s`; `make` builds what runs them, compiling where it does."""

    def __init__(
        self, name: str, members: int, make: Callable[[], Run], device: str, window_s: float
    ) -> None:
        self.name, self.members = name, members
        self._make, self._device, self._window_s = make, device, window_s
        self._run: Run | None = None
        self._calls: int | None = None
        self._peak_bytes: int | None = None

    def prepare(self) -> Window:
        """The first call ends with the first step."""
        held = self._reset_peak()
        first = timed(self._begin)
        self._take(2)  # an optimizer's state is there from the second step on
        if held is not None:
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device) - held
        return first

    def window(self) -> Window:
        if self._calls is None:  # not when it was prepared: others were at work on the device then
            self._calls = self._settle()
        return timed(lambda calls=self._calls: self._take(calls))

    def finished(self, measured: Measured) -> Measured:
        return replace(measured, peak_bytes=self._peak_bytes)

    def close(self) -> None:
        self._run = None

    def _begin(self) -> int:
        self._run = self._make()
        return self._take(1)

    def _settle(self) -> int:
        calls = 1
        while True:
            seconds = timed(lambda calls=calls: self._take(calls)).seconds
            if seconds > self._window_s / 4:
                return max(1, round(calls * self._window_s / seconds))
            calls *= 4

    def _take(self, calls: int) -> int:
        assert self._run is not None, "prepare comes first"
        self._run(calls)
        return calls * self.members

    def _reset_peak(self) -> int | None:
        if not self._device.startswith("cuda"):
            return None
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)


def repeated(step: Step, device: str) -> Run:
    """The step again and again."""

    def run(calls: int) -> None:
        for _ in range(calls):
            step()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    return run


def plain_step(workload: Workload, member: Member, data: Data) -> Step:
    """One model, eager, with torch's fused Adam."""
    model = seeded(workload, member).to(data.x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=member.lr, fused=True)
    order = torch.randperm(len(data.x), device=data.x.device).split(workload.batch_size)
    shown = torch.zeros(2, device=data.x.device)
    taken = 0

    def step() -> None:
        nonlocal taken
        rows = order[taken % len(order)]
        shown.add_(eager_step(model, optimizer, data.x[rows], data.y[rows], workload.precision))
        taken += 1

    return step


def vmap_step(workload: Workload, members: Sequence[Member], data: Data) -> Step:
    """All members through vmap(grad), eager. The place in the data is on the device too, so a graph can capture it."""
    device = str(data.x.device)
    stack = Stacked(workload, members, device)
    order = torch.rand(len(members), len(data.x), device=device).argsort(1)
    offsets = torch.arange(workload.batch_size, device=device)
    place = torch.zeros((), dtype=torch.int64, device=device)
    shown = torch.zeros(len(members), 2, device=device)

    def step() -> None:
        rows = order.index_select(1, place + offsets)
        shown.add_(stack.step(data.x[rows], data.y[rows]))
        place.copy_((place + workload.batch_size) % len(data.x))

    return step


def captured_step(workload: Workload, members: Sequence[Member], data: Data) -> Step:
    """The same, compiled and captured in a CUDA graph by hand."""
    return captured(torch.compile(vmap_step(workload, members, data), dynamic=False), data.x.device)


def captured_plain_step(
    workload: Workload, member: Member, data: Data, compiled: bool = True, innermost: bool = False
) -> Step:
    """One model compiled and captured: what one after another reaches when its owner takes the trouble; images with channels innermost, if wanted."""
    device, layout = data.x.device, torch.channels_last if innermost else torch.contiguous_format
    model = seeded(workload, member).to(device)
    if innermost:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(
        model.parameters(), lr=member.lr, fused=True, capturable=device.type == "cuda"
    )
    order = torch.randperm(len(data.x), device=device)
    offsets = torch.arange(workload.batch_size, device=device)
    place = torch.zeros((), dtype=torch.int64, device=device)
    shown = torch.zeros(2, device=device)

    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with computing_in(workload.precision, device.type):
            prediction = model(x)
            return loss(prediction, y), accuracy(prediction.detach(), y)

    run_forward = torch.compile(forward, dynamic=False) if compiled else forward

    def step() -> None:
        rows = order[place + offsets]
        optimizer.zero_grad(set_to_none=True)
        value, right = run_forward(data.x[rows].contiguous(memory_format=layout), data.y[rows])
        value.backward()
        optimizer.step()
        shown.add_(torch.stack([value.detach(), right]))
        place.copy_((place + workload.batch_size) % len(data.x))

    return captured(step, device, lambda: optimizer.zero_grad(set_to_none=True))


def captured(step: Step, device: torch.device, before: Step | None = None) -> Step:
    """The step in a CUDA graph, after a few calls that allocate what it needs; on a CPU the step itself."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    if before is not None:
        before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    replay.holds = step  # type: ignore[attr-defined]  # the graph runs its kernels on its tensors: both must live
    return replay
