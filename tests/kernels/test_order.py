"""The keys of a shuffle are the public order's, by operations and in one kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from carpool.kernels import order
from carpool.random import batch_order, order_keys


def drawn(rows: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(0)
    seeds = torch.from_numpy(random.integers(-(2**62), 2**62, rows))
    return seeds.to(device), torch.from_numpy(random.integers(0, 2**40, rows)).to(device)


def by_operations(seeds: torch.Tensor, epochs: torch.Tensor, length: int) -> torch.Tensor:
    return order_keys(torch.arange(length, device=seeds.device)[None], seeds[:, None], epochs[:, None])


@pytest.mark.parametrize(("rows", "length"), [(3, 50), (70, 1000), (2, 40_000), (1, 1)])
def test_on_a_cpu_they_are_those_of_the_operations(rows: int, length: int):
    seeds, epochs = drawn(rows)
    assert torch.equal(order.order_keys(seeds, epochs, length), by_operations(seeds, epochs, length))


def test_sorting_by_them_is_the_public_order():
    seeds, epochs = drawn(3)
    found = torch.argsort(order.order_keys(seeds, epochs, 50), dim=1, stable=True)
    for row, seed, epoch in zip(found, seeds.tolist(), epochs.tolist(), strict=True):
        assert row.tolist() == batch_order(seed, epoch, 50).tolist()


@pytest.mark.gpu
def test_the_kernel_gives_every_bit_of_the_operations():
    assert order._kernel() is not None
    given = (*drawn(64, "cuda"), 1000)
    assert torch.equal(order.order_keys(*given), by_operations(*given))


@pytest.mark.gpu
def test_on_a_gpu_without_the_kernel_they_are_the_same(monkeypatch: pytest.MonkeyPatch):
    given = (*drawn(3, "cuda"), 100)
    monkeypatch.setattr(order, "_kernel", lambda: None)
    assert torch.equal(order.order_keys(*given), by_operations(*given))


def test_without_a_compiler_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch):
    def missing(_: str) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch.cuda.jiterator, "_create_jit_fn", missing)
    order._kernel.cache_clear()
    try:
        assert order._kernel() is None
    finally:
        order._kernel.cache_clear()
