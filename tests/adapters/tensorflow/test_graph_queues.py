"""Queues and their runners: filled by threads that always stop, ended by their input, and their errors the job's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_zoo import v1

import carpool
from carpool.adapters.graph import session as sessions
from carpool.result import Outcome
from carpool.tensorflow import Graph
from patience import PATIENCE_S


@pytest.fixture(autouse=True)
def every_thread_stops() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
    assert not {thread.name for thread in threading.enumerate() if thread not in before}


def summing(capacity: int = 4, epochs: int | None = 3, shuffled: bool = False) -> dict[str, Any]:
    """Numbers through a queue that a runner fills, added up."""
    numbers = tf.constant(np.arange(10, dtype="float32"))
    if shuffled:
        one = v1.train.input_producer(
            numbers, num_epochs=epochs, shuffle=True, seed=3, capacity=capacity
        ).dequeue()
    else:
        one = v1.train.input_producer(numbers, num_epochs=epochs, shuffle=False, capacity=capacity).dequeue()
    total = v1.get_variable("total", [], initializer=v1.zeros_initializer())
    return {"now": v1.assign_add(total, one), "one": one}


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_job_ends_when_its_queue_does(shuffled: bool):
    result = carpool.train(
        [Graph(lambda: summing(shuffled=shuffled), ["now"]).job()], device="cpu", reporters=[]
    )[0]
    assert result.outcome is Outcome.COMPLETED
    assert (result.steps, float(result.model.variables["total"])) == (30, 135.0)


def test_a_job_of_so_many_steps_leaves_an_endless_queue():
    results = carpool.train(
        [Graph(lambda: summing(epochs=None), ["now"], steps=25, every=10).job(name=name) for name in "ab"],
        device="cpu",
        reporters=[],
    )
    for result in results:
        assert float(result.model.variables["total"]) == 45 + 45 + 10
        assert len(result.history["now"]) == 3


def test_two_queues_of_their_own_capacity_side_by_side():
    def build(capacity: int) -> dict[str, Any]:
        queue = v1.FIFOQueue(capacity, [tf.float32], shapes=[[]])
        count = v1.get_variable("count", [], initializer=v1.zeros_initializer())
        filling = queue.enqueue(v1.assign_add(count, 1.0))
        v1.train.add_queue_runner(v1.train.QueueRunner(queue, [filling]))
        return {"taken": queue.dequeue()}

    jobs = [Graph(lambda size=size: build(size), ["taken"], steps=20).job(name=f"{size}") for size in (1, 8)]
    for result in carpool.train(jobs, device="cpu", reporters=[]):
        assert result.model.values["taken"].tolist() == [float(n) for n in range(1, 21)]


def test_what_a_runner_raises_is_the_jobs_failure():
    def build() -> dict[str, Any]:
        queue = v1.FIFOQueue(4, [tf.float32], shapes=[[]])
        drawn = tf.constant(1.0)
        broken = v1.Assert(tf.less(drawn, 0.5), [drawn], name="checked")
        with tf.control_dependencies([broken]):
            filling = queue.enqueue(tf.identity(drawn))
        v1.train.add_queue_runner(v1.train.QueueRunner(queue, [filling]))
        return {"taken": queue.dequeue()}

    jobs = [Graph(build, ["taken"]).job(name="broken"), Graph(summing, ["now"]).job(name="sound")]
    results = carpool.train(jobs, device="cpu", reporters=[])
    assert isinstance(results["broken"].error, tf.errors.InvalidArgumentError)
    assert results["sound"].steps == 30


def test_ctrl_c_ends_a_step_that_waits_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "_STUCK_S", 0.2)

    def waiting() -> dict[str, Any]:
        return {"taken": v1.FIFOQueue(4, [tf.float32], shapes=[[]]).dequeue()}

    def raising(event: Any) -> None:
        raise KeyboardInterrupt

    jobs = [
        Graph(waiting, ["taken"], steps=1000).job(name="waits"),
        Graph(summing, ["now"], every=10).job(name="ends", callbacks=[raising]),
    ]
    with pytest.raises(carpool.Interrupted) as caught:
        carpool.train(jobs, device="cpu", reporters=[])
    assert {result.outcome for result in caught.value.results} == {Outcome.INTERRUPTED}
