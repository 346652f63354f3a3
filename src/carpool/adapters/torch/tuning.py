"""How Inductor times the forms of a kernel when it chooses one: as a captured graph replays them, which is how they will run.

Inductor launches each form from Python and times that. A kernel of a few microseconds is over before the next launch is there, all
forms seem to take as long, and it chooses any: on an H200 one that took three times as long as another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CALLS = 8  # in a graph: enough for its own launch not to matter
_REPLAYS = 5

_lock = threading.Lock()


@contextmanager
def timed_as_captured(device: torch.device) -> Iterator[None]:
    """Inside, what Inductor measures on this device it measures so; where that fails, in its own way."""
    if device.type != "cuda":
        yield
        return
    try:
        from torch._inductor.runtime.benchmarking import benchmarker

        theirs = benchmarker.benchmark_gpu
    except (ImportError, AttributeError):  # another torch than those this was written for
        yield
        return

    def measured(call: Callable[[], Any], *args: Any, **options: Any) -> Any:
        if options.get("return_mode", "min") != "min":
            return theirs(call, *args, **options)
        try:
            return captured_ms(call)
        except RuntimeError:
            return theirs(call, *args, **options)

    with _lock, _capturable(device):
        benchmarker.benchmark_gpu = measured  # type: ignore[method-assign]
        try:
            yield
        finally:
            del benchmarker.benchmark_gpu


@contextmanager
def _capturable(device: torch.device) -> Iterator[None]:
    """Inside, the current stream is one that can be captured: Inductor launches on the stream that was current when it began to measure."""
    outer = torch.cuda.current_stream(device)
    if outer != torch.cuda.default_stream(device):
        yield
        return
    inner = torch.cuda.Stream(device)
    inner.wait_stream(outer)
    with torch.cuda.stream(inner):
        yield
    outer.wait_stream(inner)


def captured_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of one call among several in a captured graph of the current stream."""
    call()  # what is set up at a first call must not be captured
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(_CALLS):
            call()
    finally:
        graph.capture_end()
    graph.replay()
    found = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / _CALLS)
    return min(found)
