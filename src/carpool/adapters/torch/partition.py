"""A part of a GPU's processors for a session: one with a share computes on these and on no others (CUDA's green contexts).

torch can make such a context, but always of the device's first processors; two of them would be one. So the device is split into its
smallest groups here, and a share takes those that the fewest others use.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch


def chosen(loads: Sequence[int], share: float) -> tuple[int, ...]:
    """Which groups make up a share, rounded down: those with the fewest sessions, of these the first.

    >>> chosen([1, 0, 0, 1], 0.5), chosen([0, 0, 0, 0], 0.01), chosen([2, 1], 0.9)
    ((1, 2), (0,), (1,))
    """
    count = max(1, int(share * len(loads)))
    return tuple(sorted(sorted(range(len(loads)), key=lambda group: (loads[group], group))[:count]))


def is_kept(device: str) -> bool:
    """Whether a session's share can be kept in this process."""
    try:
        return device.startswith("cuda") and _parts(torch.device(device).index or 0) is not None
    except torch.OutOfMemoryError:
        return False  # another time there may be room


class Part:
    """Processors and a stream that runs on them alone, until they are given back."""

    def __init__(self, device: str, share: float, priority: int) -> None:
        parts = _parts(torch.device(device).index or 0)
        assert parts is not None, "ask `is_kept` first"
        self._parts, self._priority = parts, priority
        self.groups, self.stream = parts.take(share, priority)

    def give_back(self) -> None:
        self._parts.give_back(self.groups, self._priority, self.stream)


class _Parts:
    """A device's groups of processors, and how many sessions of this process use each."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        self._driver = driver
        self._lock = threading.Lock()
        self._device = torch.device("cuda", index)
        torch.cuda.current_stream(self._device)  # torch's context is there before another is made from it
        self._place = _answer(driver.cuDeviceGet(index))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = _answer(driver.cuDeviceGetDevResource(self._place, kind))
        _, most, _ = _answer(driver.cuDevSmResourceSplitByCount(0, whole, 0, 1))
        self._groups, _, _ = _answer(driver.cuDevSmResourceSplitByCount(most, whole, 0, 1))
        self.loads = [0] * len(self._groups)
        self._idle: dict[tuple[tuple[int, ...], int], list[torch.cuda.ExternalStream]] = {}
        groups, stream = self.take(0.5, 0)  # to see whether it can be done at all
        _compute(stream)
        self.give_back(groups, 0, stream)

    def take(self, share: float, priority: int) -> tuple[tuple[int, ...], torch.cuda.ExternalStream]:
        with self._lock:
            groups = chosen(self.loads, share)
            waiting = self._idle.setdefault((groups, priority), [])
            stream = waiting.pop() if waiting else self._made(groups, priority)
            for group in groups:
                self.loads[group] += 1
        return groups, stream

    def give_back(self, groups: tuple[int, ...], priority: int, stream: torch.cuda.ExternalStream) -> None:
        with self._lock:
            for group in groups:
                self.loads[group] -= 1
            self._idle[groups, priority].append(stream)  # a new one would get new workspaces, kept for good

    def _made(self, groups: tuple[int, ...], priority: int) -> torch.cuda.ExternalStream:
        driver = self._driver
        own = [self._groups[group] for group in groups]
        described = _answer(driver.cuDevResourceGenerateDesc(own, len(own)))
        kind = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = _answer(driver.cuGreenCtxCreate(described, self._place, kind))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = _answer(driver.cuGreenCtxStreamCreate(context, flags, priority))
        return torch.cuda.ExternalStream(int(made), device=self._device)


def _compute(stream: torch.cuda.Stream) -> None:
    """Something, to see that torch's kernels run there; raises RuntimeError where they do not."""
    with torch.cuda.stream(stream):
        torch.ones(1, device=stream.device).add_(1)
    stream.synchronize()


@functools.cache
def _parts(index: int) -> _Parts | None:
    """None where the driver or its bindings know no such thing, or not in these words."""
    try:
        return _Parts(index)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return None


def _answer(reply: tuple[Any, ...]) -> Any:
    """What the driver answered; its first word is whether it could."""
    status, *found = reply
    if int(status):
        raise RuntimeError(f"CUDA's driver answered {status}")
    return found[0] if len(found) == 1 else tuple(found)
