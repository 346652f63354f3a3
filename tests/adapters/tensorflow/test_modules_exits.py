"""What ends a process ends a TensorFlow job alone, wherever the job's own code raises it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from graph_zoo import DATA, builder
from modules_zoo import data
from test_modules_train import job as made

import carpool
from carpool.tensorflow import Graph
from endings import KINDS, Go, assert_ends_alone, looping, raising

x, y = data(double=False)


def job(name: str, **options: Any) -> carpool.Job:
    return made(name=name, data=(x, y), **options)


def in_factory(go: Go) -> carpool.Job:
    def factory() -> Any:
        tf.constant(0.0)
        go()

    return job("bad", model=factory)


def in_loss(go: Go) -> carpool.Job:
    return job("bad", loss=lambda prediction, target: tf.reduce_mean(prediction) + go())


def in_optimizer(go: Go) -> carpool.Job:
    return job("bad", optimizer=go)


def in_data(go: Go) -> carpool.Job:
    return made(name="bad", data=lambda: go())


def in_source(go: Go) -> carpool.Job:
    def batches() -> Iterator[Any]:
        yield x[:8], y[:8]
        go()

    return made(name="bad", data=batches)


def in_feeds(go: Go) -> carpool.Job:
    feeds = {name: array[:8] for name, array in DATA["float32"].items()}

    def fed(step: int) -> Any:
        return feeds if step < 2 else go()

    return Graph(builder(), ["loss"], train_op="train", feeds=fed, steps=4).job(name="bad")


def in_graph(go: Go) -> carpool.Job:
    return Graph(go, ["loss"], train_op="train").job(DATA["float32"], name="bad")


PLACES = [in_factory, in_loss, in_optimizer, in_data, in_source, in_feeds, in_graph, looping]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_ends_a_process_ends_its_job_alone(
    place: Callable[[Go], carpool.Job], kind: type[BaseException]
):
    assert_ends_alone(job, place(raising(kind)), kind)
