"""Many sessions and many builds: nothing is kept, and nothing races."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from graph_zoo import DATA, builder, job

import carpool
from carpool.process.worker import rss_bytes
from carpool.tensorflow import Graph, sessions


def slope_bytes(measured: list[int]) -> float:
    """Bytes that each session adds, by least squares over the second half: the first fills caches."""
    half = measured[len(measured) // 2 :]
    return float(np.polyfit(np.arange(len(half)), half, 1)[0])


@pytest.mark.slow
def test_a_thousand_sessions_leave_nothing_behind():
    feed = {"x": DATA["float32"]["x"], "y": DATA["float32"]["y"]}
    threads, measured = threading.active_count(), []
    for number in range(1000):
        with sessions({"a": builder()}) as opened:
            opened["a"].run_async(["train", "loss"], feed).result()
        if number % 10 == 0:
            gc.collect()
        measured.append(rss_bytes() or 0)
    print(f"{slope_bytes(measured):.0f} bytes a session; {measured[0] >> 20} to {measured[-1] >> 20} MiB")
    assert slope_bytes(measured) < 16 * 1024
    assert threading.active_count() <= threads


@pytest.mark.slow
def test_a_thousand_jobs_leave_nothing_behind():
    measured = []
    for number in range(125):
        carpool.train([job(f"{n}", seed=n, epochs=1) for n in range(8)], device="cpu", reporters=[])
        if number % 5 == 0:
            gc.collect()
        measured.append(rss_bytes() or 0)
    print(f"{slope_bytes(measured) / 8:.0f} bytes a job; {measured[0] >> 20} to {measured[-1] >> 20} MiB")
    assert slope_bytes(measured) / 8 < 16 * 1024


def built_at_once(count: int) -> list[tuple[bytes, float]]:
    """So many graphs built and run once, all of them at the same time."""
    together = threading.Barrier(count)

    def one(number: int) -> tuple[bytes, float]:
        made = Graph(builder(("dense", "wide")[number % 2]), ["loss"], train_op="train")
        together.wait()
        graph, _ = made.build(seed=number % 4)
        with made.session() as session:
            loss = session.run("loss:0", {"x:0": DATA["float32"]["x"], "y:0": DATA["float32"]["y"]})
        return graph.as_graph_def().SerializeToString(deterministic=True), float(loss)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def assert_as_alone(found: list[tuple[bytes, float]], alone: dict[int, Any]) -> None:
    for number, made in enumerate(found):
        assert made == alone.setdefault(number % 4, made)


def test_graphs_are_built_in_threads_as_alone():
    alone: dict[int, Any] = {0: built_at_once(1)[0]}
    assert_as_alone(built_at_once(8), alone)


@pytest.mark.slow
def test_sixty_four_builds_twenty_times():
    alone = dict(enumerate(built_at_once(4)))
    for _ in range(20):
        assert_as_alone(built_at_once(64), alone)
