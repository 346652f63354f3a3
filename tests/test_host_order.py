"""The order of samples on a host: one order, by NumPy and by the compiled page."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from carpool import machine, order, random


def drawn(rows: int) -> tuple[np.ndarray, np.ndarray]:
    found = np.random.default_rng(0)
    return found.integers(-(2**62), 2**62, rows), found.integers(0, 2**40, rows)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    order._asked.cache_clear()
    yield
    order._asked.cache_clear()


@pytest.mark.parametrize(("rows", "length"), [(3, 50), (70, 1000), (2, 40_000), (1, 1)])
def test_keys_in_blocks_are_those_of_the_definition(rows: int, length: int):
    seeds, epochs = drawn(rows)
    defined = random.order_keys(np.arange(length)[None], seeds[:, None], epochs[:, None])
    assert np.array_equal(order.order_keys(seeds, epochs, length), defined)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 64, 65, 1000])
@pytest.mark.parametrize("kinds", [1, 5, 2**63])
def test_keys_that_are_nearly_or_wholly_equal_are_sorted_as_argsort_does(length: int, kinds: int):
    found = np.random.default_rng(length)
    keys = found.integers(0, kinds, (20, length), np.uint64).astype(np.int64)
    keys[::2] = found.integers(0, 2**63, (10, length), np.uint64).astype(np.int64)
    assert order.sorted_places(keys).tolist() == np.argsort(keys, axis=1, kind="stable").tolist()


@pytest.mark.parametrize(
    ("rows", "length"), [(0, 5), (3, 0), (3, 1), (2, 2), (5, 3), (64, 1000), (2, 70_000)]
)
def test_the_compiled_page_gives_the_same_order(rows: int, length: int):
    made, given = order._native(), (*drawn(rows), length)
    assert made is not None, "the machine that tests has a C compiler"
    assert np.array_equal(order._by_buckets(made, *given), order.sorted_places(order.order_keys(*given)))


def test_nobody_waits_for_the_compiler(monkeypatch: pytest.MonkeyPatch):
    go, made = threading.Event(), order._native()

    def slowly() -> object:
        go.wait()
        return made

    monkeypatch.setattr(order, "_native", slowly)
    used: list[int] = []
    buckets = order._by_buckets
    monkeypatch.setattr(order, "_by_buckets", lambda *given: used.append(given[-1]) or buckets(*given))
    try:
        before = order.batch_orders([1, 2], [0, 0], 20_000)
        assert not used
    finally:
        go.set()
    order._asked().result()
    assert np.array_equal(order.batch_orders([1, 2], [0, 0], 20_000), before)
    assert used == [20_000]


def test_a_short_shuffle_asks_for_no_compiler():
    assert sorted(order.batch_order(0, 0, 1000).tolist()) == list(range(1000))
    assert order._asked.cache_info().currsize == 0


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "true", 'cc "-D'])
def test_without_a_compiler_it_is_numpy(monkeypatch: pytest.MonkeyPatch, compiler: str):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(machine.NoMachineCode):
        machine.made("int one(void) { return 1; }")
    assert order._native() is None


def test_without_a_thread_it_is_numpy(monkeypatch: pytest.MonkeyPatch):
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert sorted(order.batch_order(0, 0, 20_000).tolist()) == list(range(20_000))


def test_long_rows_are_sorted_by_whole_keys_at_once(monkeypatch: pytest.MonkeyPatch):
    seeds, epochs = drawn(2)
    before = order.sorted_places(order.order_keys(seeds, epochs, 100))
    monkeypatch.setattr(order, "_FEW_TIES", 99)
    assert np.array_equal(order.sorted_places(order.order_keys(seeds, epochs, 100)), before)


def test_a_compiler_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(order, "_SOURCE", order._SOURCE.replace("round < 10", "round < 9"))
    assert order._native() is None
