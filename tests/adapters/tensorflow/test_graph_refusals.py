"""What is wrong with a graph's job is said before anything runs, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_zoo import DATA, builder, v1

import carpool
from carpool.errors import CarpoolError, DataError, FileError, ModelError, OptionError
from carpool.job import Job
from carpool.tensorflow import Graph

X = DATA["float32"]


def planned(*jobs: Job) -> str:
    return carpool.plan(jobs, device="cpu").explain()


def elsewhere() -> Any:
    with tf.Graph().as_default():
        return tf.constant(1.0, name="stranger")


def unfed() -> dict[str, Any]:
    made = builder()()
    rate = v1.placeholder(tf.float32, [], name="keep")
    return {**made, "loss": made["loss"] * rate}


GRAPHS: dict[str, tuple[Callable[[], Graph], str]] = {
    "a tensor of another graph": (lambda: Graph(builder(), {"loss": elsewhere()}, train_op="train"), "'stranger:0', which is in another one"),
    "a tensor of another graph among feeds": (lambda: Graph(builder(), "loss", feeds={elsewhere(): 1.0}, train_op="train"), "feeds to be of the job's own graph"),
    "an eager tensor": (lambda: Graph(builder(), {"loss": tf.constant(1.0)}, train_op="train"), "an eager tensor, which has its value already"),
    "an eager variable": (lambda: Graph(builder(), {"loss": tf.Variable(tf.constant(1.0))}, train_op="train"), "an eager tensor, which has its value already"),
    "a number": (lambda: Graph(builder(), {"loss": 3}, train_op="train"), "Received: int"),
    "a name that is not there": (lambda: Graph(builder(), ["los"], train_op="train"), "did you mean loss"),
    "a placeholder that is not fed": (lambda: Graph(unfed, ["loss"], train_op="train"), "none for 'keep'"),
    "an optimizer and no train_op": (lambda: Graph(builder(), ["loss"]), "pass train_op=, or train_op=False"),
    "a train_op that is no element": (lambda: Graph(builder(), ["loss"], train_op=print), "train_op to be an element of a graph"),
    "a value of another type": (lambda: Graph(unfed, ["loss"], train_op="train", feeds={"keep": "half"}), "of type float32 for 'keep:0'"),
    "a value of another shape": (lambda: Graph(unfed, ["loss"], train_op="train", feeds={"keep": [1.0, 2.0]}), "reshape the value"),
    "a function that returns a list": (lambda: Graph(lambda: [1], ["loss"]), "returns tensors by name"),  # type: ignore[arg-type,return-value]
    "feeds that are a number": (lambda: Graph(builder(), ["loss"], train_op="train", feeds=3), "a feed dict a step"),
}  # fmt: skip


@pytest.mark.parametrize("case", GRAPHS)
def test_a_graph_is_refused(case: str):
    make, said = GRAPHS[case]
    with pytest.raises(CarpoolError) as caught:
        planned(Job(make(), X, name="a"))
    assert said in str(caught.value)
    assert "Job 'a'" in str(caught.value)
    assert "Remedy" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": ()}, "data by name, or steps="),
        ({"data": (X["x"], X["y"])}, "data by the names of placeholders"),
        ({"data": {"x": X["x"], "y": X["y"][:3]}}, "one first dimension"),
        ({"data": {"x": X["x"][:, :2], "y": X["y"]}}, "reshape the value"),
        ({"data": {"z": X["x"]}}, "data['z'] to name an element"),
        ({"data": X, "loss": max}, "say it in the graph"),
        ({"data": X, "clip_norm": 1.0}, "say it in the graph"),
        ({"data": X, "accumulate": 2}, "say it in the graph"),
        ({"data": X, "validation_data": (X["x"],)}, "validation_data by name"),
        ({"data": iter([1]), "index": [0]}, "index= beside arrays"),
    ],
)
def test_a_job_is_refused(options: dict[str, Any], said: str):
    options = dict(options)
    with pytest.raises((ModelError, DataError)) as caught:
        planned(Job(Graph(builder(), ["loss"], train_op="train"), options.pop("data"), name="a", **options))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Graph(3, ["loss"]), "a tf.Graph, or a function"),  # type: ignore[arg-type]
        (lambda: Graph(builder(), []), "something to fetch"),
        (lambda: Graph(builder(), ["loss"], steps=0), "steps of at least 1"),
        (lambda: Graph(builder(), ["loss"], every=0), "every of at least 1"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused_at_once(make: Callable[[], Graph], said: str):
    with pytest.raises((ModelError, OptionError), match=said):
        make()


def test_a_tf_graph_alone_does_not_say_what_to_run():
    with pytest.raises(ModelError, match=r"pass carpool\.tensorflow\.Graph"):
        planned(Job(tf.Graph(), X, name="a"))


def test_a_graph_object_holds_the_values_of_one_job():
    graph = Graph(builder(), ["loss"], train_op="train")
    with pytest.raises(ModelError, match="the one of job 'a'"):
        planned(Job(graph, X, name="a"), Job(graph, X, name="b"))


def test_a_graph_with_a_python_function_in_it_is_not_copied():
    with tf.Graph().as_default() as graph:
        made = v1.py_func(lambda: np.float32(1.0), [], tf.float32, name="mine")
    jobs = [Graph(graph, {"made": made}, steps=2).job(name=name) for name in "ab"]
    with pytest.raises(ModelError, match="'mine', a Python function in the graph"):
        planned(*jobs)
    assert carpool.train(jobs[:1], device="cpu", reporters=[])[0].steps == 2


def test_an_initialiser_that_leaves_a_variable_out():
    def build() -> dict[str, Any]:
        made = builder()()
        first = next(one for one in v1.global_variables() if one.op.name == "first")
        return {**made, "init": first.initializer}

    one = Job(Graph(build, ["loss"], train_op="train", init="init"), X)
    with pytest.raises(ModelError, match=r"init to give every variable that the job uses a value.*second"):
        carpool.train([one], device="cpu", reporters=[])


def test_checkpoints_of_a_finalized_graph_need_a_saver():
    with tf.Graph().as_default() as graph:
        made = builder()()
    graph.finalize()
    one = Graph(graph, {"loss": made["loss"]}, train_op=made["train"], checkpoints="somewhere/model")
    with pytest.raises(ModelError, match=r"before graph\.finalize\(\), and pass saver="):
        planned(Job(one, X))


def test_a_checkpoint_that_is_not_there():
    one = Job(Graph(builder(), ["loss"], train_op="train", restore="nowhere"), X)
    with pytest.raises(FileError, match="nowhere, which holds none"):
        carpool.train([one], device="cpu", reporters=[])


def test_a_device_that_is_not_there():
    with pytest.raises(CarpoolError, match="a device out of auto, cpu"):
        carpool.plan([Job(Graph(builder(), ["loss"], train_op="train"), X)], device="cuda:9")
