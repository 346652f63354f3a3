"""Streams, time and readings on a device the host runs ahead of; on a CPU the host's own clock and memory."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from carpool.adapters.torch.partition import Part, is_kept

_idle: dict[
    tuple[str, int], list[torch.cuda.Stream]
] = {}  # a new stream would get new workspaces, kept for good


class Stream:
    """A stream of a session's own. What was enqueued before it was made happens before anything on it.

    With a share it runs on a part of the device's processors, where that can be kept.
    """

    def __init__(self, device: str, priority: int = 0, share: float | None = None) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._part: Part | None = None
        self._key = (device, -1 if priority > 0 else 0)
        if not device.startswith("cuda"):
            return
        if share is not None and share < 1 and is_kept(device):
            self._part = Part(device, share, self._key[1])
            self._stream = self._part.stream
        else:
            waiting = _idle.setdefault(self._key, [])
            self._stream = waiting.pop() if waiting else torch.cuda.Stream(device, priority=self._key[1])
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def turn(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def close(self) -> None:
        """Waits for everything enqueued, so that what it uses may be given back; the next session may have the stream."""
        if self._stream is not None:
            self._stream.synchronize()
            if self._part is not None:
                self._part.give_back()
            else:
                _idle[self._key].append(self._stream)
            self._stream = None


class Clock:
    """Measures from its making to `stop`; `seconds` may be asked once the device is through."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._marks = [self._mark()]

    def stop(self) -> Clock:
        self._marks.append(self._mark())
        return self

    def seconds(self) -> float:
        start, end = self._marks
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1000
        return float(end) - float(start)  # type: ignore[arg-type]

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Receipt:
    """A tensor on its way to the host: reading waits for it alone, not for what was enqueued after it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._there = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def done(self) -> bool:
        """Whether reading would not wait."""
        return self._there is None or self._there.query()

    def read(self) -> np.ndarray:
        if self._there is not None:
            self._there.synchronize()
        return self._host.numpy()
