"""What only a GPU can show of JAX jobs: the promise there, torch and JAX beside one another, convolutions by measurement."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax_zoo import BATCH, convolution, data, loss, mlp, what_is_left
from test_jax_conformance import TestJax as Conformance

import carpool
from carpool.result import Outcome
from carpool.testing.conformance import assert_close

pytestmark = pytest.mark.gpu


class TestJaxOnGpu(Conformance):
    device = "cuda"

    @pytest.fixture(autouse=True)
    def in_full_precision(self):
        with jax.default_matmul_precision("highest"):
            yield


def job(model: Any, rate: float, seed: int, **options: Any) -> carpool.Job:
    optimizer = optax.adam(rate)
    settings = {"batch_size": BATCH, "epochs": 3, "seed": seed, "name": f"{rate}-{seed}", **options}
    return carpool.Job(model, data(False), loss=loss, optimizer=optimizer, **settings)


@pytest.mark.usefixtures("trials")
def test_convolutions_take_a_formulation_that_was_measured():
    with jax.default_matmul_precision("highest"):
        jobs = [job(convolution, 0.01 * (i + 1), i) for i in range(4)]
        together = carpool.train(jobs, device="cuda", reporters=[])
        for one, result in zip(jobs, together, strict=True):
            (alone,) = carpool.train([one], device="cuda", reporters=[])
            assert_close(what_is_left(result), what_is_left(alone), double=False)


def test_torch_and_jax_share_the_device():
    import torch

    x, y = data(False)
    torch_jobs = [
        carpool.Job(
            lambda: torch.nn.Linear(6, 3),
            (x, y.astype(np.int64)),
            loss=torch.nn.functional.cross_entropy,
            optimizer=partial(torch.optim.Adam, lr=0.01),
            name=f"torch {i}",
            seed=i,
        )
        for i in range(2)
    ]
    results = carpool.train(
        [*torch_jobs, *(job(mlp, 0.01, i) for i in range(2))], device="cuda", reporters=[]
    )
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert {str(next(r.model.parameters()).device) for r in list(results)[:2]} == {"cpu"}
