"""What ends a process ends a JAX job alone, wherever the job's own code raises it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

import carpool
from endings import KINDS, Go, assert_ends_alone, looping, raising

X, Y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")


def line(key: Any) -> Any:
    return {"w": jax.random.normal(key, (3, 1))}


def squares(model: Any, batch: Any) -> Any:
    return ((batch[0] @ model["w"] - batch[1]) ** 2).mean()


def job(name: str, **options: Any) -> carpool.Job:
    settings = {"model": line, "data": (X, Y), "step": squares, "optimizer": optax.sgd(0.1), "epochs": 2}
    return carpool.Job(**{**settings, "name": name, **options})


def in_factory(go: Go) -> carpool.Job:
    return job("bad", model=lambda key: go())


def in_step(go: Go) -> carpool.Job:
    return job("bad", step=lambda model, batch: go())


def in_optimizer(go: Go) -> carpool.Job:
    return job("bad", optimizer=optax.GradientTransformation(go, go))


def in_data(go: Go) -> carpool.Job:
    return job("bad", data=lambda: go())


def in_source(go: Go) -> carpool.Job:
    def batches() -> Iterator[Any]:
        yield X[:8], Y[:8]
        go()

    return job("bad", data=batches)


PLACES = [in_factory, in_step, in_optimizer, in_data, in_source, looping]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_ends_a_process_ends_its_job_alone(
    place: Callable[[Go], carpool.Job], kind: type[BaseException]
):
    assert_ends_alone(job, place(raising(kind)), kind)
