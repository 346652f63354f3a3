"""What a Keras job draws from the process's generators depends on its own seed alone, whatever draws beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

import carpool
from drawing import Meeting, at_once, own_generators

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


class Noisy(layers.Layer):
    """Draws from Keras' own, NumPy's and Python's generators, operator by operator."""

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        return x + keras.random.normal((1,)) + np.float32(np.random.rand() + random.random())


def model(*middle: Any) -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), *middle, layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=bool(middle))
    return made


def noisy() -> keras.Model:
    return model(Noisy())


def batches() -> Iterator[Any]:
    """A generator that draws, read by the model's own fit."""
    while True:
        yield X[:4] + np.float32(np.random.rand()), Y[:4] + np.float32(random.random())


def job(make: Callable[[], keras.Model], data: Any = (X, Y), **arguments: Any) -> carpool.Job:
    fit = {} if isinstance(data, tuple) else {"steps_per_epoch": 3}
    return carpool.Job(make, data, fit=fit, **{"batch_size": 4, "epochs": 2, **arguments})


def train(*jobs: carpool.Job) -> carpool.Results:
    return carpool.train(list(jobs), device="cpu", strategy="interleaved", reporters=[])


def bits(result: carpool.Result) -> list[bytes]:
    return [np.asarray(weight).tobytes() for weight in result.model.get_weights()]


@pytest.mark.parametrize("data", ["a generator that draws", "eager layers that draw"])
def test_a_job_beside_others_that_draw_has_the_weights_and_the_end_that_it_has_alone(data: str):
    def drawing(name: str, seed: int) -> carpool.Job:
        if data == "a generator that draws":
            return job(model, batches(), name=name, seed=seed)
        return job(noisy, name=name, seed=seed)

    together = train(*(drawing(name, seed) for name, seed in (("a", 1), ("b", 3), ("c", 1))))
    assert bits(together["b"]) == bits(train(drawing("b", 3))[0])
    assert bits(together["a"]) == bits(together["c"]) != bits(together["b"])


def test_two_threads_that_train_at_once_leave_each_job_with_the_bits_of_running_alone():
    made = Meeting()

    def met() -> keras.Model:
        made.meet()
        return noisy()

    alone = [bits(train(job(noisy, seed=seed))[0]) for seed in (1, 2)]
    runs = [partial(train, job(met, seed=seed)) for seed in (1, 2)]
    assert [bits(results[0]) for results in at_once(*runs)] == alone


def test_training_leaves_the_processs_own_generators_as_they_were():
    keras.random.normal((1,))  # Keras' own exists from now on
    held: Any = get_global_attribute(GLOBAL_SEED_GENERATOR)
    before = own_generators(), np.asarray(held.state).tolist()
    draws = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: keras.random.normal((1,)))
    results = train(job(noisy, batches(), name="a"), job(noisy, callbacks=[draws], name="b"))
    assert not results.failed
    assert get_global_attribute(GLOBAL_SEED_GENERATOR) is held
    assert (own_generators(), np.asarray(held.state).tolist()) == before


def test_an_eager_layer_may_draw_without_a_seed_in_a_process_that_has_not_drawn_yet():
    """Keras' own generator would be made in the middle of the layer's symbolic call, and never hold a number."""
    set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    assert not train(job(noisy)).failed
