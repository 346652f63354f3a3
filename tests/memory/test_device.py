"""What a device has, read from the operating system and from a stand-in for the driver."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from carpool.memory import device
from carpool.memory.device import DeviceMemory


class Driver:
    """NVML with these GPUs; counts how often it was opened and closed."""

    def __init__(self, *gpus: DeviceMemory) -> None:
        self._gpus = gpus
        self.opened = self.closed = 0

    NVMLError = pynvml.NVMLError

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> DeviceMemory:
        return self._gpus[index]

    def nvmlDeviceGetMemoryInfo(self, handle: DeviceMemory) -> SimpleNamespace:
        return SimpleNamespace(total=handle.total_bytes, free=handle.free_bytes)

    def nvmlDeviceGetName(self, handle: DeviceMemory) -> str:
        return handle.name


SMALL, LARGE = DeviceMemory("small", 100, 60), DeviceMemory("large", 1000, 900)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(SMALL, LARGE)
    monkeypatch.setattr(device, "pynvml", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


def test_the_host_has_memory_some_of_it_free():
    memory = device.read("cpu")
    assert memory.name == "cpu"
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert memory.total_bytes > 100 * 1024 * 1024


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound()  # type: ignore[attr-defined]  # made when pynvml is imported

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert device.gpus() == ()


def test_every_gpu_is_listed_and_the_driver_stays_open_once(two_gpus: Driver):
    assert device.gpus() == device.gpus() == (SMALL, LARGE)
    assert (two_gpus.opened, two_gpus.closed) == (3, 2)


def test_a_gpu_is_read_by_its_number(two_gpus: Driver):
    assert device.read("cuda:1") == LARGE
    assert device.read("cuda") == device.read("cuda:0") == SMALL
    assert (two_gpus.opened, two_gpus.closed) == (4, 3)


@pytest.mark.parametrize(
    ("visible", "expected"), [("1,0", LARGE), ("1", LARGE), ("0", SMALL), ("", SMALL), ("GPU-4fe3", SMALL)]
)
def test_numbers_are_those_of_the_visible_gpus(
    two_gpus: Driver, monkeypatch: pytest.MonkeyPatch, visible: str, expected: DeviceMemory
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.read("cuda:0") == expected


def test_the_driver_is_closed_when_reading_fails(two_gpus: Driver):
    with pytest.raises(IndexError):
        device.read("cuda:5")
    assert two_gpus.closed == 1
