"""A share is processors of a session's own, in this process where that can be kept."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import carpool
from carpool.adapters.torch import partition
from carpool.adapters.torch.partition import chosen
from carpool.adapters.torch.train import TorchAdapter
from carpool.errors import JobError


def job(name: str, share: float | None = None, width: int = 2, **options: Any) -> carpool.Job:
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    make = partial(nn.Sequential, nn.Linear(2, width), nn.Linear(width, 1))
    return carpool.Job(
        make,
        (x, y),
        name=name,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        share=share,
        **options,
    )


@pytest.mark.parametrize("shares", [(0.5, 0.25, 0.25), (0.35, 0.35, 0.3), (0.1,) * 10, (0.9, 0.1)])
def test_shares_that_fit_together_do_not_overlap(shares: tuple[float, ...]):
    loads = [0] * 16
    for share in shares:
        for group in chosen(loads, share):
            loads[group] += 1
    assert max(loads) == 1


def test_others_have_what_is_used_least():
    assert chosen([2, 1, 1, 2], 0.5) == (1, 2)


def test_without_a_gpu_a_share_needs_a_worker():
    plan = carpool.plan([job("a", share=0.5)], device="cpu")
    assert plan.groups[0].strategy == "isolated"
    with pytest.raises(JobError, match="share="):
        carpool.plan([job("a", share=0.5)], device="cpu", strategy="in_turn")


def test_where_it_can_be_kept_here_nobody_is_isolated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TorchAdapter, "keeps_shares", lambda _: True)
    jobs = [job("a", 0.5), job("b", 0.25), job("c"), job("d"), job("slow", 0.5, width=3, timeout_s=600)]
    plan = carpool.plan(jobs, device="cpu", strategy="auto")
    found = {group.names: group.strategy for group in plan.groups}
    assert found == {("a", "b"): "fused", ("c", "d"): "fused", ("slow",): "isolated"}
    results = carpool.train([job("a", 0.5)], device="cpu", strategy="in_turn", reporters=[])
    assert results["a"].outcome.word == "completed"


class Driver(ModuleType):
    """As much of CUDA's bindings as is asked, for 20 processors that can be parted by 8."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, status: int = 0) -> None:
        super().__init__("driver")
        self.status = status
        self.made: list[tuple[list[str], int]] = []

    def cuDeviceGet(self, index: int) -> tuple:
        return self.status, index

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple:
        return 0, "whole"

    def cuDevSmResourceSplitByCount(self, count: int, whole: str, flags: int, least: int) -> tuple:
        assert whole == "whole"
        return 0, ["first", "second"][:count], 2, "rest"

    def cuDevResourceGenerateDesc(self, groups: list[str], count: int) -> tuple:
        assert len(groups) == count
        return 0, groups

    def cuGreenCtxCreate(self, described: list[str], device: int, flags: int) -> tuple:
        return 0, described

    def cuGreenCtxStreamCreate(self, context: list[str], flags: int, priority: int) -> tuple:
        self.made.append((context, priority))
        return 0, len(self.made)


def parts(monkeypatch: pytest.MonkeyPatch, driver: ModuleType, compute: Any = lambda _: None) -> Any:
    bindings = ModuleType("bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: (number, str(device)))
    monkeypatch.setattr(partition, "_compute", compute)
    return partition._parts.__wrapped__(0)


def test_each_group_has_a_stream_of_its_own_which_the_next_session_gets_again(
    monkeypatch: pytest.MonkeyPatch,
):
    driver = Driver()
    found = parts(monkeypatch, driver)
    assert found.loads == [0, 0], "what it tried is given back"
    groups, first = found.take(0.5, 0)
    others, second = found.take(0.5, -1)
    assert (groups, others) == ((0,), (1,))
    assert first != second
    assert driver.made == [(["first"], 0), (["second"], -1)]
    assert found.loads == [1, 1]
    found.give_back(groups, 0, first)
    assert found.loads == [0, 1]
    assert found.take(0.5, 0) == (groups, first)
    assert len(driver.made) == 2


def test_one_that_cannot_be_made_is_not_counted(monkeypatch: pytest.MonkeyPatch):
    driver = Driver()
    found = parts(monkeypatch, driver)
    monkeypatch.setattr(driver, "cuGreenCtxCreate", lambda *_: (2, None))
    with pytest.raises(RuntimeError, match="answered 2"):
        found.take(0.5, -1)
    assert found.loads == [0, 0]


def test_a_driver_that_cannot_part_its_device_keeps_no_shares(monkeypatch: pytest.MonkeyPatch):
    assert parts(monkeypatch, Driver(status=801)) is None
    assert parts(monkeypatch, ModuleType("an old one")) is None
    unwilling = Driver()
    monkeypatch.setattr(unwilling, "cuGreenCtxStreamCreate", lambda *_: (801, None))
    assert parts(monkeypatch, unwilling) is None

    def refuses(stream: Any) -> None:
        raise RuntimeError("CUDA error: invalid resource handle")

    assert parts(monkeypatch, Driver(), refuses) is None


_SEEN = """
extern "C" __global__ void seen(int* processors) {
    int own;
    asm volatile("mov.u32 %0, %smid;" : "=r"(own));
    long long until = clock64() + 20000;
    while (clock64() < until);
    processors[own] = 1;
}
"""


@pytest.mark.gpu
def test_two_halves_of_a_gpu_are_two():
    from carpool.adapters.torch.clock import Stream
    from carpool.kernels.cuda import compiled

    if not partition.is_kept("cuda:0"):
        pytest.skip("this driver, or its bindings, cannot part a GPU")
    kernels = compiled(_SEEN, ("seen",))
    assert kernels is not None
    count = torch.cuda.get_device_properties(0).multi_processor_count

    def processors(stream: Stream) -> set[int]:
        with stream.turn():
            found = torch.zeros(count, dtype=torch.int32, device="cuda")
            kernels["seen"](grid=(64 * count, 1, 1), block=(256, 1, 1), args=[found])
            return set(found.nonzero().flatten().tolist())

    streams = [Stream("cuda:0", share=0.5), Stream("cuda:0", share=0.5), Stream("cuda:0")]
    one, other, whole = map(processors, streams)
    for stream in streams:
        stream.close()
    assert not one & other
    assert len(one) == len(other)
    assert 0.4 * count <= len(one) <= 0.6 * count
    assert len(whole) == count


@pytest.mark.gpu
def test_jobs_with_shares_end_as_they_do_without():
    if not partition.is_kept("cuda:0"):
        pytest.skip("this driver, or its bindings, cannot part a GPU")

    def trained(share: float | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        jobs = [job("a", share, epochs=3), job("b", share, epochs=3), job("c", share, width=5, epochs=3)]
        results = carpool.train(jobs, device="cuda", reporters=[])
        assert {result.strategy for result in results} == {"fused", "interleaved"}
        return [p.detach().cpu() for result in results for p in result.model.parameters()]

    for with_share, without in zip(trained(0.25), trained(None), strict=True):
        torch.testing.assert_close(with_share, without)
