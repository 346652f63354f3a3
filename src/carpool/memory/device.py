"""What a device has: read through NVML for GPUs and from the operating system for the CPU. No framework is asked."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory at one moment."""

    name: str
    total_bytes: int
    free_bytes: int


def read(device: str) -> DeviceMemory:
    """The memory of "cpu" or "cuda:N"."""
    if device.startswith("cuda"):
        return _gpu(int(device.partition(":")[2] or 0))
    return _host()


def gpus() -> tuple[DeviceMemory, ...]:
    """Every GPU that NVML sees; none where there is no driver."""
    try:
        with _nvml():
            return tuple(_handle_memory(i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()


def other_processes() -> tuple[int | None, ...]:
    """How many processes beside this one compute on each GPU; None where the driver does not tell."""
    try:
        with _nvml():
            return tuple(_others(i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()


def _others(index: int) -> int | None:
    try:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:
        return None
    return sum(int(process.pid) != os.getpid() for process in found)


def _gpu(index: int) -> DeviceMemory:
    with _nvml():
        return _handle_memory(_physical(index))


def _physical(index: int) -> int:
    name = visible_name(index, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return int(name) if name.isdigit() else index


def visible_name(index: int, visible: str) -> str:
    """What a process that is to see this device alone has as its CUDA_VISIBLE_DEVICES; `visible` is ours.

    >>> visible_name(1, ""), visible_name(1, "4, 6"), visible_name(0, "GPU-3f")
    ('1', '6', 'GPU-3f')
    """
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    return chosen[index] if index < len(chosen) else str(index)


def _handle_memory(index: int) -> DeviceMemory:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return DeviceMemory(str(pynvml.nvmlDeviceGetName(handle)), int(info.total), int(info.free))


_open: list[
    Any
] = []  # the driver's library, once it was opened: opening it again is quick while somebody has it open


def _stay_open() -> None:
    if pynvml not in _open:
        pynvml.nvmlInit()
        _open.append(pynvml)


@contextmanager
def _nvml():
    _stay_open()
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _host() -> DeviceMemory:
    page = os.sysconf("SC_PAGE_SIZE")
    free = _available() or page * os.sysconf("SC_AVPHYS_PAGES")
    return DeviceMemory("cpu", page * os.sysconf("SC_PHYS_PAGES"), free)


def _available() -> int | None:
    """What Linux says can be had without swapping: free pages and the page cache it would give back."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(kilobytes) * 1024 for kilobytes in found), None)
