"""What people try first on a GPU: the plain loop in threads, or in processes, with and without NVIDIA's MPS.

Steady, as in `peers_cuda`: models and data are on the device before a window begins. A few models stand for all: what these
ways reach together does not depend on how many follow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing import get_context

from benchmarks import precision
from benchmarks.caches import environment
from benchmarks.peers_cuda import Run, Steps, plain_step, repeated
from benchmarks.record import Measured, Window
from benchmarks.windows import Unavailable, Way
from benchmarks.workloads import Data, Member, Workload
from carpool.process.mps import service

COUNT = 4
_ANSWER_S = 60.0  # they have had the others' preparation to start in


def in_threads(workload: Workload, members: Sequence[Member], data: Data) -> Run:
    """A thread for each model, on a stream of its own."""
    device = data.x.device
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in members]
    steps = [plain_step(workload, member, data) for member in members]
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was built on this thread's stream is there for the others

    def work(number: int, calls: int, faults: list[BaseException]) -> None:
        stream = streams[number]
        try:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                for _ in range(calls):
                    steps[number]()
        except Exception as error:  # a thread has nobody else to tell
            faults.append(error)
        if stream is not None:
            stream.synchronize()

    def run(calls: int) -> None:
        faults: list[BaseException] = []
        threads = [threading.Thread(target=work, args=(i, calls, faults)) for i in range(len(members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]

    return run


class Processes(Way):
    """A process for each model; through MPS, their kernels run at the same time instead of in turns."""

    def __init__(
        self,
        workload: Workload,
        members: Sequence[Member],
        device: str,
        window_s: float,
        *,
        mps: bool = False,
    ) -> None:
        self.name = "processes + MPS" if mps else "processes"
        self.members = len(members)
        self._start = lambda: _crew(workload, members, device, mps)
        self._steps = Steps(self.name, self.members, self._made, "cpu", window_s)  # their memory is not ours
        self._open = ExitStack()
        self._run: Run | None = None

    def begin(self) -> None:
        self._run = self._open.enter_context(self._start())

    def prepare(self) -> Window:
        return self._steps.prepare()

    def window(self) -> Window:
        return self._steps.window()

    def finished(self, measured: Measured) -> Measured:
        return self._steps.finished(measured)

    def close(self) -> None:
        self._steps.close()
        self._open.close()

    def _made(self) -> Run:
        if self._run is None:
            self.begin()
        assert self._run is not None, "begin makes it"
        return self._run


@contextmanager
def _crew(workload: Workload, members: Sequence[Member], device: str, mps: bool) -> Iterator[Run]:
    """Processes that start now, and what runs their steps; the first run waits until all are there."""
    if mps and not device.startswith("cuda"):
        raise Unavailable("needs a GPU: MPS shares one among processes")
    with ExitStack() as open:
        found = open.enter_context(service()) if mps else None
        if found is not None and not found.on:
            raise Unavailable(f"needs MPS: {found.story}")
        threads = max(1, torch.get_num_threads() // len(members))
        with environment(found.variables if found else {}):
            pipes = [open.enter_context(_worker(workload, one, device, threads)) for one in members]

        def run(calls: int) -> None:
            for pipe in pipes:
                pipe.send(calls)
            for pipe in pipes:
                _heard(pipe)

        yield run


@contextmanager
def _worker(workload: Workload, member: Member, device: str, threads: int) -> Iterator[Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process: Any = context.Process(
        target=serve, args=(theirs, workload, member, device, threads), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()


def _heard(pipe: Connection) -> None:
    try:
        fault = pipe.recv() if pipe.poll(_ANSWER_S) else "a process does not answer"
    except (EOFError, OSError):
        fault = "a process ended"
    if fault:
        raise RuntimeError(fault)


def serve(pipe: Connection, workload: Workload, member: Member, device: str, threads: int) -> None:
    """A process: gets ready, then runs as many steps as it is told, until the other end is closed."""
    try:
        run, fault = _prepared(workload, member, device, threads), ""
    except Exception as error:
        run, fault = None, _said(error)
    while True:
        try:
            calls = pipe.recv()
        except EOFError:
            return
        pipe.send(fault if run is None else _ran(run, calls))


def _prepared(workload: Workload, member: Member, device: str, threads: int) -> Run:
    torch.set_num_threads(threads)
    precision.allow(workload.precision)
    return repeated(plain_step(workload, member, workload.data().to(device)), device)


def _ran(run: Run, calls: int) -> str:
    try:
        run(calls)
    except Exception as error:
        return _said(error)
    return ""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
