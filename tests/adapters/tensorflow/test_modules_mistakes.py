"""The most common mistakes with TensorFlow: each gets one error that says what was expected, what came and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_zoo import DATA, builder
from modules_zoo import data
from test_modules_train import job

import carpool
from carpool.errors import CarpoolError, DataError, LossError
from carpool.tensorflow import Graph, run, sessions, step_seed

x, y = data(double=False)


def planned(made: carpool.Job) -> Any:
    return carpool.plan([made], device="cpu")


INDEX = [
    ([True, False], "index as a mask of"),
    ([0.0, 1.0], "index of whole numbers"),
    ([[0, 1]], "index in one dimension"),
]


@pytest.mark.parametrize(("index", "said"), INDEX)
def test_an_index_of_another_kind_is_refused(index: Any, said: str):
    with pytest.raises(DataError, match=rf"^Job 'a': Expected {said}"):
        planned(job(name="a", index=index))


@pytest.mark.parametrize(("index", "said"), [*INDEX, ([-1], "index within"), ([9999], "index within")])
def test_an_index_of_another_kind_is_refused_beside_a_graph(index: Any, said: str):
    model = Graph(builder(), ["loss"], train_op="train")
    with pytest.raises(DataError, match=rf"Job 'a': Expected {said}"):
        planned(carpool.Job(model, DATA["float32"], name="a", index=index))


def test_a_value_under_the_name_of_another_is_refused():
    def step(model: Any, batch: Any) -> Any:
        loss = tf.reduce_mean(model(batch[0]))
        return {"loss": loss, 3: loss}

    with pytest.raises(LossError, match=r"^Job 'a': Expected names of values that are text. Received: 3"):
        planned(job(name="a", loss=None, step=step))


TABLE: list[tuple[str, tuple[Any, ...], str]] = [
    ("steps", (0, -1, 2.5, True, "3"), "steps of at least 1"),
    ("every", (0, -1, 2.5, True, "3", None), "every of at least 1"),
    ("checkpoints", (3, "", []), "checkpoints as a path"),
    ("restore", (3, "", []), "restore as a path"),
    ("summaries", ("logs", ["a", "b"], ("a",)), "summaries="),
    ("validation_feeds", ([1], 3), "validation_feeds as a dict"),
    ("names", (["x"], {1: 2}), "names"),
]


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [(word, value, said) for word, values, said in TABLE for value in values],
    ids=lambda value: repr(value)[:20],
)
def test_an_argument_of_a_graph_is_looked_at(word: str, value: Any, said: str):
    with pytest.raises(CarpoolError, match=f"Expected .*{said}.*Received: .*Remedy: "):
        Graph(builder(), ["loss"], **{word: value})


@pytest.mark.parametrize("threads", [0, -1, 2.5, True, "2", None])
def test_threads_of_sessions_are_counted(threads: Any):
    with pytest.raises(CarpoolError, match=r"threads of at least 1"):
        sessions({"a": builder()}, threads=threads)


@pytest.mark.parametrize("memory", [["1GiB"], "1GiB", {"b": "1GiB"}, {"a": "much"}, {"a": -1}])
def test_memory_of_sessions_is_by_name(memory: Any):
    with pytest.raises(CarpoolError, match=r"memory"):
        sessions({"a": builder()}, memory=memory)


@pytest.mark.parametrize(("fetches", "feeds"), [(["loss"], None), ({}, None), ({"a": "loss"}, [1])])
def test_fetches_and_feeds_of_a_graph_are_by_name(fetches: Any, feeds: Any):
    with pytest.raises(CarpoolError, match=r"Expected f.* Remedy: "):
        run(builder(), fetches, feeds=feeds)


@pytest.mark.parametrize(("seed", "step"), [(0.5, 0), (True, 0), (0, -1), (0, 1.0), ("0", 0)])
def test_the_seed_of_no_step(seed: Any, step: Any):
    with pytest.raises(CarpoolError, match=r"seed that is a whole number|step of at least 0"):
        step_seed(seed, step)


def test_a_step_may_be_a_number_of_tensorflows_or_numpys():
    wanted = step_seed(3, 2)
    steps: list[Any] = [np.int64(2), tf.constant(2)]
    assert all(bool(tf.reduce_all(step_seed(3, step) == wanted)) for step in steps)
