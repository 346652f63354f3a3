"""The most common mistakes with TensorFlow: each gets one error that says what was expected, what came and what to do."""

from __future__ import annotations

from inspect import signature
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
    ("saver", (3, "saver", []), "a saver"),
    ("config", (3, "gpu", {}), "config as a tf.compat.v1.ConfigProto"),
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


# Data that the model or the loss does not take


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((x.astype("float64"), y), "data of the type that the model's weights have. Received: x of"),
        ((x[:, :-1], y), "data of the shape that the model and the loss take. Received: x of"),
    ],
)
def test_data_that_does_not_fit_is_one_clear_error(made: Any, said: str):
    with pytest.raises(DataError) as caught:
        carpool.train([job(name="a", data=made)], device="cpu", reporters=[])
    assert str(caught.value).startswith("Job 'a': Expected ")
    assert said in str(caught.value)
    assert caught.value.__cause__ is not None


# Every argument of the public functions

LOOKED_AT: dict[str, set[str]] = {
    "Graph": {"graph", "fetches", "feeds", "train_op", "init"},  # test_graph_refusals.py
    "Graph.job": {"data", "options"},  # a Job's
    "Graph.build": {"seed"},  # a Job's
    "Graph.frozen": {"fetches", "feeds", "options"},  # a Graph's
    "Graph.saved_model": {"signature", "options"},  # known by what was loaded; a Graph's
    "run": {"graph", "init"},  # those of sessions
    "sessions": {"init"},  # what is no operation is named by TensorFlow
}
"""Arguments that no table here has, and where they are looked at."""
CALLS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Graph": {word: values for word, values, _ in TABLE},
    "Graph.frozen": {"source": (None, 3, [1])},
    "Graph.saved_model": {"path": (None, 3, b"a"), "tags": ("serve", 3, [1])},
    "Graph.save": {"path": (None, 3, "", [1])},
    "run": {"fetches": (["loss"], {}), "feeds": ([1],), "session": (3, "a")},
    "sessions": {
        "graphs": (None, {}, [builder()], {3: builder()}),
        "memory": (["1GiB"], {"b": "1GiB"}),
        "threads": (0, 2.5),
        "config": (3, {}, "gpu"),
    },
    "step_seed": {"seed": (0.5, True), "step": (-1, 1.0)},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Graph": {"graph": builder(), "fetches": ["loss"]},
    "Graph.frozen": {"fetches": ["loss"]},
    "Graph.saved_model": {"path": "no folder"},
    "run": {"graph": builder(), "fetches": {"a": "loss"}},
    "sessions": {"graphs": {"a": builder()}},
    "step_seed": {"seed": 0, "step": 0},
}


def public() -> dict[str, Any]:
    graph = Graph(builder(), ["loss"], train_op="train")
    methods = {
        f"Graph.{name}": getattr(graph, name) for name in ("frozen", "saved_model", "job", "build", "save")
    }
    return {"Graph": Graph, "run": run, "sessions": sessions, "step_seed": step_seed, **methods}


@pytest.mark.parametrize("name", public())
def test_every_argument_is_looked_at(name: str):
    wanted = set(signature(public()[name]).parameters)
    assert wanted == LOOKED_AT.get(name, set()) | set(CALLS.get(name, {}))


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        (name, word, value)
        for name, words in CALLS.items()
        for word, values in words.items()
        for value in values
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_wrong_value_is_refused(name: str, word: str, value: Any):
    with pytest.raises(CarpoolError, match=r"Expected .+Received: .+Remedy: "):
        public()[name](**{**DEFAULTS.get(name, {}), word: value})
