"""A shuffle is the public order, by operations, by sorting and in one kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from carpool.kernels import order
from carpool.order import batch_orders
from carpool.random import order_keys


def drawn(rows: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(0)
    seeds = torch.from_numpy(random.integers(-(2**62), 2**62, rows))
    return seeds.to(device), torch.from_numpy(random.integers(0, 2**40, rows)).to(device)


def by_operations(seeds: torch.Tensor, epochs: torch.Tensor, length: int) -> torch.Tensor:
    return order_keys(torch.arange(length, device=seeds.device)[None], seeds[:, None], epochs[:, None])


def public(seeds: torch.Tensor, epochs: torch.Tensor, length: int) -> list[list[int]]:
    return batch_orders(seeds.tolist(), epochs.cpu().numpy(), length).tolist()


@pytest.mark.parametrize("length", [1, 2, 50])
def test_on_a_cpu_it_is_the_public_order(length: int):
    given = (*drawn(3), length)
    assert order.orders(*given).tolist() == public(*given)


GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    order._asked.cache_clear()
    yield
    order._asked.cache_clear()


def made() -> order.Kernels:
    """The kernels, once they are compiled."""
    found = order._asked(GPU).result()
    assert found is not None
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "length"), [(2, 1), (5, 2), (64, 33), (300, 1000), (9, 8192), (3, 15_000)])
def test_a_row_that_fits_a_block_is_ordered_in_one_kernel(rows: int, length: int):
    assert made().fits(length)
    given = (*drawn(rows, "cuda:0"), length)
    assert made().order(*given).tolist() == public(*given)
    assert order.orders(*given).tolist() == public(*given)


@pytest.mark.gpu
def test_a_row_that_does_not_is_sorted(monkeypatch: pytest.MonkeyPatch):
    assert not made().fits(70_000)
    given = (*drawn(2, "cuda:0"), 70_000)
    assert order.orders(*given).tolist() == public(*given)
    monkeypatch.setattr(order, "_MOST_PARTS", 3)  # fewer blocks than a row has parts
    assert torch.equal(made().keys(*given), by_operations(*given))


@pytest.mark.gpu
def test_on_a_gpu_without_the_kernels_it_is_the_same(monkeypatch: pytest.MonkeyPatch):
    given = (*drawn(3, "cuda:0"), 100)
    monkeypatch.setattr(order, "_kernels_for", lambda _: None)
    assert order.orders(*given).tolist() == public(*given)


@pytest.mark.gpu
def test_equal_keys_are_read_by_position():
    """No two keys are equal by chance: of keys of one bit, most are."""
    blunt = order.Kernels(GPU, order._SOURCE.replace("return (", "return (1ull << 62) & ("))
    given = (*drawn(4, "cuda:0"), 500)
    keys = blunt.keys(*given)
    assert set(keys.unique().tolist()) == {0, 1 << 62}
    assert torch.equal(blunt.order(*given), torch.argsort(keys, dim=1, stable=True))


def test_nobody_waits_for_them_to_be_compiled(monkeypatch: pytest.MonkeyPatch):
    done = threading.Event()

    def compile_slowly(_: torch.device) -> str:
        done.wait()
        return "kernels"

    monkeypatch.setattr(order, "_kernels", compile_slowly)
    try:
        assert order._kernels_for(GPU) is None
    finally:
        done.set()
    order._asked(GPU).result()
    assert order._kernels_for(GPU) == "kernels"


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(order, "Kernels", missing)
    assert order._asked(GPU).result() is None
    assert order._kernels_for(GPU) is None


def test_where_memory_was_short_they_are_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    asked: list[torch.device] = []

    def full(device: torch.device) -> None:
        asked.append(device)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(order, "Kernels", full)
    for _ in range(2):
        assert order._asked(GPU).exception() is not None
        assert order._kernels_for(GPU) is None
    assert asked == [GPU, GPU]
