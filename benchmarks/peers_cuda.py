"""Steady peers on a GPU: state and data stay on the device, and a window is nothing but steps.

That flatters them: carpool's windows beside them are whole calls, with models built, checked and read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.peers_torch import Adam, eager_step, seeded, stacked
from benchmarks.record import Measured, Window
from benchmarks.windows import Way, timed
from benchmarks.workloads import Data, Member, Workload

Step = Callable[[], None]


class Steps(Way):
    """Windows of so many calls of a step that a window lasts `window_s`; `make` builds it, compiling where it does."""

    def __init__(
        self, name: str, members: int, make: Callable[[], Step], device: str, window_s: float
    ) -> None:
        self.name, self.members = name, members
        self._make, self._device, self._window_s = make, device, window_s
        self._step: Step | None = None
        self._calls = 1
        self._peak_bytes: int | None = None

    def prepare(self) -> Window:
        """The first call ends with the first step; settling how long a window is comes after it."""
        held = self._reset_peak()
        first = timed(self._begin)
        self._calls = self._settle()
        if held is not None:
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device) - held
        return first

    def window(self) -> Window:
        return timed(lambda: self._run(self._calls))

    def finished(self, measured: Measured) -> Measured:
        return replace(measured, peak_bytes=self._peak_bytes)

    def close(self) -> None:
        self._step = None

    def _begin(self) -> int:
        self._step = self._make()
        return self._run(1)

    def _settle(self) -> int:
        calls = 1
        while True:
            seconds = timed(lambda calls=calls: self._run(calls)).seconds
            if seconds > self._window_s / 4:
                return max(1, round(calls * self._window_s / seconds))
            calls *= 4

    def _run(self, calls: int) -> int:
        assert self._step is not None, "prepare comes first"
        for _ in range(calls):
            self._step()
        self._wait()
        return calls * self.members

    def _wait(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)

    def _reset_peak(self) -> int | None:
        if not self._device.startswith("cuda"):
            return None
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)


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
        shown.add_(eager_step(model, optimizer, data.x[rows], data.y[rows]))
        taken += 1

    return step


def vmap_step(workload: Workload, members: Sequence[Member], data: Data) -> Step:
    """All members through vmap(grad), eager. The place in the data is on the device too, so a graph can capture it."""
    device = str(data.x.device)
    weights, gradients = stacked(workload, members, device)
    adam = Adam(weights, members)
    order = torch.rand(len(members), len(data.x), device=device).argsort(1)
    offsets = torch.arange(workload.batch_size, device=device)
    place = torch.zeros((), dtype=torch.int64, device=device)
    shown = torch.zeros(len(members), 2, device=device)

    def step() -> None:
        rows = order.index_select(1, place + offsets)
        grads, values = gradients(weights, data.x[rows], data.y[rows])
        adam.step(grads)
        shown.add_(values)
        place.copy_((place + workload.batch_size) % len(data.x))

    return step


def captured_step(workload: Workload, members: Sequence[Member], data: Data) -> Step:
    """The same, compiled and captured in a CUDA graph by hand."""
    compiled = torch.compile(vmap_step(workload, members, data))
    if data.x.device.type != "cuda":
        return compiled
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compiled()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled()

    def replay() -> None:
        graph.replay()

    replay.holds = compiled  # type: ignore[attr-defined]  # the graph runs its kernels on its tensors: both must live
    return replay
