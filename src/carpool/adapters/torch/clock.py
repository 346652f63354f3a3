"""Time on a device: events on a GPU, where the host runs ahead; the host's own clock elsewhere."""

from __future__ import annotations

import time

import torch


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
