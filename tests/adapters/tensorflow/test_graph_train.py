"""Jobs of TensorFlow 1 graphs: side by side, each to the bit as alone, and the ways to feed them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_zoo import DATA, builder, job, plain_loop, v1

import carpool
from carpool.errors import StepError
from carpool.events import EpochEnded
from carpool.job import Job
from carpool.result import Outcome
from carpool.tensorflow import Graph


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [one.name for one in set(threading.enumerate()) - before if one.name.startswith("carpool")]
    assert not left


def trained(jobs: list[Job], **options: Any) -> carpool.Results:
    return carpool.train(jobs, **{"device": "cpu", "reporters": [], "on_error": "raise", **options})


def same_bits(one: Graph, values: Any) -> bool:
    return set(one.variables) == set(values) and all(
        (one.variables[name] == np.asarray(value)).all() for name, value in values.items()
    )


def test_eight_graphs_end_to_the_bit_where_each_ends_alone():
    kinds = ("dense", "dropping", "convolving", "looping")
    jobs = [job(f"{n}", seed=n, epochs=3, batch_size=8 + n, model=kinds[n % 4]) for n in range(8)]
    results = trained(jobs)
    for one, result in zip(jobs, results, strict=True):
        alone = plain_loop(one)
        assert same_bits(result.model, alone.weights)
        assert list(result.history["loss"]) == list(alone.history)
        assert result.outcome is Outcome.COMPLETED
        assert result.steps == 3 * -(-40 // one.batch_size)


def test_one_after_another_ends_at_the_same_bits():
    together = trained([job(f"{n}", seed=n) for n in range(3)])
    in_turn = trained([job(f"{n}", seed=n) for n in range(3)], strategy="in_turn")
    for one, other in zip(together, in_turn, strict=True):
        assert same_bits(one.model, other.model.variables)


def test_in_a_process_of_its_own_it_ends_at_the_same_bits():
    here = trained([job("a", seed=4)])[0]
    apart = trained([job("a", seed=4)], strategy="isolated")[0]
    assert apart.strategy == "isolated"
    assert same_bits(apart.model, here.model.variables)
    assert apart.history == here.history


@pytest.mark.slow
def test_a_live_graph_goes_to_a_process_of_its_own_too():
    graph, made = live()
    one = Graph(graph, {"loss": made["loss"]}, train_op=made["train"])
    apart = trained([Job(one, DATA["float32"], name="a")], strategy="isolated")[0]
    assert same_bits(apart.model, trained([job("a", epochs=1, batch_size=32)])[0].model.variables)


def live(seed: int = 0, **options: Any) -> tuple[tf.Graph, dict[str, Any]]:
    """A graph that the user has built."""
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(seed)
        return graph, builder(**options)()


@pytest.mark.parametrize("is_final", [False, True])
def test_a_graph_of_the_users_own_is_left_as_it_is(is_final: bool):
    graph, made = live()
    if is_final:
        graph.finalize()
    before = len(graph.get_operations())
    one = Graph(graph, {"loss": made["loss"]}, train_op=made["train"])
    result = trained([Job(one, DATA["float32"], batch_size=8, epochs=2)])[0]
    assert len(graph.get_operations()) == before
    assert same_bits(result.model, plain_loop(job()).weights)


def test_one_tf_graph_in_two_jobs_is_copied_for_the_second():
    graph, made = live()

    def one(name: str, epochs: int) -> Job:
        fetched = Graph(graph, {"loss": made["loss"]}, train_op=made["train"], feeds=None)
        return Job(
            fetched,
            {made["x"]: DATA["float32"]["x"], "y": DATA["float32"]["y"]},
            name=name,
            epochs=epochs,
            batch_size=8,
        )

    jobs = [one("a", 2), one("b", 2), one("c", 3)]
    plan = carpool.plan(jobs, device="cpu").explain()
    assert "its graph is a copy: 'a' has the same tf.Graph" in plan
    results = trained(jobs)
    assert same_bits(results["a"].model, plain_loop(job(epochs=2)).weights)
    assert same_bits(results["b"].model, results["a"].model.variables)
    assert same_bits(results["c"].model, plain_loop(job(epochs=3)).weights)


def test_what_is_fetched_last_is_kept_and_scalars_are_history():
    graph = Graph(builder(), {"error": "loss", "made": "made"}, train_op="train")
    result = trained([Job(graph, DATA["float32"], batch_size=8)])[0]
    assert set(result.history) == {"error"}
    assert result.model.values["made"].shape == (8, 1)
    assert result.value["made"] is result.model.values["made"]


def test_validation_stopping_and_the_best_weights():
    graph = Graph(builder("wide", rate=0.5), ["loss"], train_op="train")
    seen: list[EpochEnded] = []
    stop = carpool.EarlyStopping("val_loss", patience=2, restore_best=True)
    one = Job(
        graph,
        DATA["float32"],
        validation_data=DATA["float32"],
        stop=stop,
        epochs=40,
        batch_size=8,
        callbacks=[seen.append],
    )
    result = trained([one])[0]
    assert result.outcome is Outcome.STOPPED
    best = min(result.history["val_loss"])
    assert (result.metric("val_loss"), result.is_restored) == (best, True)
    with result.model.session() as session:
        data = DATA["float32"]
        loss = session.run("loss:0", {"x:0": data["x"], "y:0": data["y"]})
    assert float(loss) == pytest.approx(best, rel=1e-5)
    assert len(seen) == len(result.history["loss"])


# Feeding


def counting() -> dict[str, Any]:
    """A graph without data: it adds what it is fed."""
    amount = v1.placeholder(tf.float32, [], name="amount")
    total = v1.get_variable("total", [], initializer=v1.zeros_initializer())
    return {"amount": amount, "now": v1.assign_add(total, amount)}


def test_a_value_that_stays_and_a_row_of_history_every_so_many_steps():
    graph = Graph(counting, ["now"], feeds={"amount": 2.0}, steps=7, every=3)
    result = trained([graph.job(name="a")])[0]
    assert result.history["now"] == (4.0, 10.0, 14.0)
    assert result.steps == 7
    assert result.model.variables["total"] == 14.0


def test_feeds_may_be_a_function_of_the_step():
    graph = Graph(counting, ["now"], feeds=lambda step: {"amount": step}, steps=5, every=5)
    assert trained([graph.job()])[0].model.variables["total"] == 10.0


def test_feeds_may_be_an_iterator_and_the_job_ends_with_it():
    graph = Graph(counting, ["now"], feeds=({"amount": 1.0} for _ in range(250)), every=100)
    result = trained([graph.job()])[0]
    assert result.outcome is Outcome.COMPLETED
    assert result.steps == 250
    assert result.history["now"] == (50.5, 150.5, 225.5)


def test_feeds_that_end_where_a_row_ends_add_no_row():
    graph = Graph(counting, ["now"], feeds=({"amount": 1.0} for _ in range(200)), every=100)
    result = trained([graph.job(stop=carpool.EarlyStopping("now", patience=9, mode="max"))])[0]
    assert (result.steps, result.history["now"]) == (200, (50.5, 150.5))


def test_batches_may_be_streamed_by_name():
    data = DATA["float32"]

    def batches() -> Iterator[dict[str, Any]]:
        for start in (0, 8, 16, 24, 32):
            yield {"x": data["x"][start : start + 8], "y": data["y"][start : start + 8]}

    streamed = Job(Graph(builder(), ["loss"], train_op="train"), batches, epochs=2)
    arrays = job(epochs=2, batch_size=8)
    unshuffled = Job(arrays.model, arrays.data, epochs=2, batch_size=8, shuffle=False)
    assert same_bits(trained([streamed])[0].model, plain_loop(unshuffled).weights)


def test_a_view_of_the_data():
    one = Job(
        Graph(builder(), ["loss"], train_op="train"), DATA["float32"], index=np.arange(20), batch_size=8
    )
    part = {name: array[:20] for name, array in DATA["float32"].items()}
    other = Job(Graph(builder(), ["loss"], train_op="train"), part, batch_size=8)
    assert same_bits(trained([one])[0].model, trained([other])[0].model.variables)


def test_a_data_set_of_tensorflow_in_the_graph_ends_the_job():
    def build() -> dict[str, Any]:
        numbers = v1.data.make_one_shot_iterator(tf.data.Dataset.range(30)).get_next()
        total = v1.get_variable("total", [], tf.int64, v1.zeros_initializer())
        return {"now": v1.assign_add(total, numbers)}

    result = trained([Graph(build, ["now"]).job()])[0]
    assert (result.steps, int(result.model.variables["total"])) == (30, 435)


# Failures


def test_a_job_that_raises_in_its_thread_fails_alone_with_what_it_reached():
    def broken(step: int) -> dict[str, Any]:
        if step == 30:
            raise ValueError("no more of this")
        return {"amount": 1.0}

    jobs = [Graph(counting, ["now"], feeds=broken, steps=100, every=10).job(name="broken"), job("sound")]
    results = carpool.train(jobs, device="cpu", reporters=[])
    assert isinstance(results["broken"].error, ValueError)
    assert results["broken"].steps == 30
    assert len(results["broken"].history["now"]) == 3
    assert results["broken"].model.variables["total"] == 30.0
    assert same_bits(results["sound"].model, plain_loop(job("sound")).weights)


def test_an_error_in_the_last_step_is_not_lost():
    def broken(step: int) -> dict[str, Any]:
        return {"amount": 1.0 if step < 9 else "x"}

    graph = Graph(counting, ["now"], feeds=broken, steps=10, every=10)
    results = carpool.train([graph.job(name="broken"), job("sound")], device="cpu", reporters=[])
    assert results["broken"].outcome is Outcome.FAILED
    assert "float32" in str(results["broken"].error)


def test_a_placeholder_that_a_function_forgets_is_explained():
    graph = Graph(counting, ["now"], feeds=lambda step: {}, steps=3)
    with pytest.raises(StepError, match="a value for every placeholder"):
        trained([graph.job()])


def test_ctrl_c_ends_every_thread_and_keeps_what_was_reached():
    def interrupting(event: EpochEnded) -> None:
        if event.epoch == 2:
            signal.raise_signal(signal.SIGINT)

    jobs = [
        Graph(counting, ["now"], feeds={"amount": 1.0}, steps=10**9, every=50).job(
            name="a", callbacks=[interrupting]
        ),
        Graph(counting, ["now"], feeds={"amount": 1.0}, steps=10**9, every=50).job(name="b"),
    ]
    with pytest.raises(carpool.Interrupted) as caught:
        carpool.train(jobs, device="cpu", reporters=[])
    for result in caught.value.results:
        assert result.outcome is Outcome.INTERRUPTED
        assert result.model.variables["total"] == result.steps > 0


def test_numbers_too_small_for_their_type_end_as_in_a_plain_session():
    """Adam's powers of beta after a thousand steps: TensorFlow's threads make zeros of them."""
    one = job("a", epochs=210, batch_size=8)
    alone = plain_loop(one)
    assert alone.weights["beta1_power"] == 0.0
    assert same_bits(trained([one, job("b")])["a"].model, alone.weights)
    assert (np.full(1, 1e-38, np.float32) * np.float32(0.01))[0] != 0.0  # here nothing changed
