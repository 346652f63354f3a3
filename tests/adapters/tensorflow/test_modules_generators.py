"""What a module's job draws from TensorFlow's own generator depends on its seed alone, whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import carpool
from carpool.ambient import Ambient, seeded
from drawing import Meeting, Source, at_once, own_generators

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def test_tensorflows_eager_numbers_are_a_programs_own_also_under_the_seed_that_the_process_has():
    def drawn(count: int) -> list[float]:
        return [float(tf.random.normal(())) for _ in range(count)]

    tf.random.set_seed(3)
    wanted = drawn(4)
    tf.random.set_seed(3)
    assert drawn(1) == wanted[:1]
    other = Ambient(3)
    for first in range(3):
        with other.inside():
            assert drawn(1) == wanted[first : first + 1]
        with seeded(3):
            assert drawn(2) == wanted[:2]
    assert drawn(3) == wanted[1:]


class Drawn(tf.Module):
    """Weights from TensorFlow's, NumPy's and Python's generators, and a step that draws in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(tf.random.normal((3, 1)) * float(np.random.rand()) * random.random())

    def __call__(self, x: Any) -> Any:
        return x @ self.w


def loss(prediction: Any, target: Any) -> Any:
    return tf.reduce_mean((prediction - target) ** 2)


def job(make: Callable[[], tf.Module], data: Any = (X, Y), **arguments: Any) -> carpool.Job:
    optimizer = partial(keras.optimizers.SGD, 0.1)
    said = {"batch_size": 4, "epochs": 2, "loss": loss, "optimizer": optimizer, **arguments}
    return carpool.Job(make, data, **said)


def train(*jobs: carpool.Job) -> carpool.Results:
    return carpool.train(list(jobs), device="cpu", strategy="interleaved", reporters=[])


def bits(result: carpool.Result) -> bytes:
    return result.model.w.numpy().tobytes()


def own() -> Any:
    """TensorFlow's generators too."""
    held: Any = context.context()
    return own_generators(), held._seed, held._rng.getstate()


DRAWS: dict[str, Callable[[], Any]] = {
    "tensorflow": lambda: tf.random.normal(()),
    "numpy": lambda: np.random.rand(),
    "python": lambda: random.random(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_job_beside_a_source_that_draws_has_the_weights_and_the_end_that_it_has_alone(draw: Any):
    source = Source((X[:4], Y[:4]), draw)
    beside = train(
        job(Drawn, source, name="source", epochs=1, prefetch=1 << 20),
        job(factory(lambda: source.beside(Drawn)), name="beside", seed=3),
    )
    assert bits(beside["beside"]) == bits(train(job(Drawn, name="beside", seed=3))[0])


def factory(make: Callable[[], tf.Module]) -> Callable[[], tf.Module]:
    """Known to make a module of TensorFlow's by what it names."""

    def made() -> tf.Module:
        return make()

    return made


def test_two_threads_that_train_at_once_leave_each_job_with_the_bits_of_running_alone():
    made = Meeting()

    def met() -> tf.Module:
        made.meet()
        return Drawn()

    alone = [bits(train(job(Drawn, seed=seed))[0]) for seed in (1, 2)]
    runs = [partial(train, job(met, seed=seed)) for seed in (1, 2)]
    assert [bits(results[0]) for results in at_once(*runs)] == alone


def test_training_leaves_the_processs_own_generators_as_they_were():
    class Drawing:
        def __iter__(self) -> Any:
            for draw in DRAWS.values():
                draw()
                yield X[:4], Y[:4]

    tf.random.set_seed(5)
    before = own()
    results = train(
        job(Drawn, Drawing(), name="source"),
        job(Drawn, name="beside", callbacks=[lambda event: [draw() for draw in DRAWS.values()]]),
    )
    assert not results.failed
    assert own() == before
