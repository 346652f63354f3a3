"""What a JAX job draws from the process's generators depends on its own seed alone, whatever draws beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import carpool
from carpool.jax import Model
from drawing import Meeting, Source, at_once, own_generators

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def drawn(key: Any) -> Model:
    """A factory that asks NumPy and Python instead of its key."""
    w = np.random.randn(3, 1) * random.random()
    return Model({"w": jnp.asarray(w, jnp.float32)}, lambda p, x: x @ p["w"])


def loss(prediction: Any, target: Any) -> Any:
    return ((prediction - target) ** 2).mean()


def job(make: Callable[[Any], Model], data: Any = (X, Y), **arguments: Any) -> carpool.Job:
    said = {"batch_size": 4, "epochs": 2, "loss": loss, "optimizer": optax.sgd(0.1), **arguments}
    return carpool.Job(make, data, **said)


def train(*jobs: carpool.Job) -> carpool.Results:
    return carpool.train(list(jobs), device="cpu", strategy="interleaved", reporters=[])


def bits(result: carpool.Result) -> bytes:
    return np.asarray(result.model.parameters["w"]).tobytes()


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "python"])
def test_a_job_beside_a_source_that_draws_has_the_weights_and_the_end_that_it_has_alone(draw: Any):
    source = Source((X[:4], Y[:4]), draw)
    beside = train(
        job(drawn, source, name="source", epochs=1, prefetch=1 << 20),
        job(lambda key: source.beside(lambda: drawn(key)), name="beside", seed=3),
    )
    assert bits(beside["beside"]) == bits(train(job(drawn, name="beside", seed=3))[0])


def test_two_threads_that_train_at_once_leave_each_job_with_the_bits_of_running_alone():
    made = Meeting()

    def met(key: Any) -> Model:
        made.meet()
        return drawn(key)

    alone = [bits(train(job(drawn, seed=seed))[0]) for seed in (1, 2)]
    assert alone[0] != alone[1]
    runs = [partial(train, job(met, seed=seed)) for seed in (1, 2)]
    assert [bits(results[0]) for results in at_once(*runs)] == alone


def test_jobs_of_one_drawing_factory_have_the_weights_that_each_has_alone():
    """Factories of many jobs are called once for all of them, but for one that draws."""
    together = carpool.train([job(drawn, name=str(seed), seed=seed) for seed in range(4)], reporters=[])
    alone = [train(job(drawn, seed=seed))[0] for seed in range(4)]
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(
            ours.model.parameters["w"], theirs.model.parameters["w"], rtol=1e-5, atol=1e-7
        )


def test_training_leaves_the_processs_own_generators_as_they_were():
    class Drawing:
        def __iter__(self) -> Any:
            for _ in range(3):
                yield X[:4] + np.float32(np.random.rand() + random.random()), Y[:4]

    def data() -> Any:
        return X + np.float32(np.random.rand() + random.random()), Y

    before = own_generators()
    results = train(
        job(drawn, Drawing(), name="source"),
        job(drawn, data, name="function", callbacks=[lambda event: np.random.rand()]),
    )
    assert not results.failed
    assert own_generators() == before
