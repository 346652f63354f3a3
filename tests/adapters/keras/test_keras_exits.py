"""What ends a process ends a Keras job alone, wherever the job's own code raises it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import keras_zoo as zoo
import numpy as np
import pytest

import carpool
from endings import KINDS, Go, assert_ends_alone, looping, raising

X, Y = np.ones((26, 5), "float32"), np.zeros(26, "int32")


def job(name: str, **options: Any) -> carpool.Job:
    settings = {"model": zoo.sequential(), "data": (X, Y), "epochs": 3, "batch_size": 13}
    return carpool.Job(**{**settings, "name": name, **options})


def in_callback(go: Go) -> carpool.Job:
    return job("bad", callbacks=[go])


def in_callback_of_keras(go: Go) -> carpool.Job:
    return job("bad", callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=go)])


def in_callback_at_a_batch(go: Go) -> carpool.Job:
    return job("bad", callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=go)])


def in_factory(go: Go) -> carpool.Job:
    return job("bad", model=lambda: go(), fit={})


def in_layer(go: Go) -> carpool.Job:
    model = keras.Sequential([keras.layers.Lambda(go, output_shape=(5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return job("bad", model=model)


def in_loss(go: Go) -> carpool.Job:
    model = zoo.sequential()
    model.compile("sgd", lambda target, prediction: go())
    return job("bad", model=model)


def in_source(go: Go) -> carpool.Job:
    def batches() -> Iterator[Any]:
        yield X[:13], Y[:13]
        go()

    return job("bad", data=batches())


PLACES = [
    in_callback, in_callback_of_keras, in_callback_at_a_batch, in_factory, in_layer, in_loss, in_source, looping
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_ends_a_process_ends_its_job_alone(
    place: Callable[[Go], carpool.Job], kind: type[BaseException]
):
    assert_ends_alone(job, place(raising(kind)), kind)
