"""The most common mistakes with JAX: each gets one error that says what was expected, what came and what to do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_loops as loops
import numpy as np
import optax
import pytest

import carpool
from carpool.errors import CarpoolError, DataError, LossError
from carpool.jax import Model, population, step_key


def linear(key: Any) -> Model:
    return Model({"w": jax.random.normal(key, (6, 3))}, lambda own, x: x @ own["w"])


def line(key: Any) -> Any:
    return {"w": jax.random.normal(key, (3, 1))}


def squares(model: Any, batch: Any) -> Any:
    return ((batch[0] @ model["w"] - batch[1]) ** 2).mean()


def planned(job: carpool.Job) -> Any:
    return carpool.plan([job], device="cpu")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([True, False], "index as a mask of"),
        ([0.0, 1.0], "index of whole numbers"),
        ([[0, 1]], "index in one dimension"),
        (jnp.asarray([0.5]), "index of whole numbers"),
    ],
)
def test_an_index_of_another_kind_is_refused(index: Any, said: str):
    with pytest.raises(DataError, match=rf"^Job 'a': Expected {said}"):
        planned(loops.job(linear, name="a", index=index))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"loss": 1.0, 3: 2.0}, "names of values that are text"),
        ({"loss": 1.0, "val_loss": 2.0}, "'val_loss' to be what validation shows of 'loss'"),
    ],
)
def test_a_value_under_the_name_of_another_is_refused(made: dict[Any, float], said: str):
    def step(model: Any, batch: Any) -> Any:
        return {name: value * model(batch[0]).mean() for name, value in made.items()}

    job = loops.job(linear, name="a", step=step)
    job = carpool.Job(
        linear, job.data, name="a", step=step, optimizer=job.optimizer, validation_data=job.data
    )
    with pytest.raises(LossError, match=rf"^Job 'a': Expected {said}"):
        planned(job)


# Populations

TABLE: list[tuple[str, tuple[Any, ...], str]] = [
    ("init", (None, 3), "init to be a function"),
    ("step", (None, "mse"), "step to be a function"),
    ("optimizer", ("sgd", 3, None), "an optax optimizer"),
    ("keys", (0, -1, 2.5, True, "4", [0.5], [[1, 2]], None, []), "a count of members, their seeds"),
    ("hyper", ([0.1], "lr", {1: 2}), "hyper"),
    ("hyper", ({"lr": "a"}, {"lr": [0.1, 0.2]}, {"lr": None}), "hyper-parameter lr"),
]


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [(word, value, said) for word, values, said in TABLE for value in values],
    ids=lambda value: repr(value)[:20],
)
def test_an_argument_of_a_population_is_looked_at(word: str, value: Any, said: str):
    rate = lambda lr: optax.sgd(lr)  # noqa: E731
    given: dict[str, Any] = {
        "init": line,
        "step": squares,
        "optimizer": rate,
        "keys": 4,
        "hyper": {"lr": 0.1},
    }
    with pytest.raises(CarpoolError, match=f"Expected .*{said}.*Received: .*Remedy: "):
        population(**{**given, word: value})


def test_a_misspelt_argument_of_a_population():
    with pytest.raises(CarpoolError, match=r"did you mean 'hyper='"):
        population(line, squares, optax.sgd(0.1), keys=2, hypers={})  # type: ignore[call-arg]


def test_places_in_a_population():
    pop = population(line, squares, optax.sgd(0.1), keys=3)
    for place in ([0, 1], 1.5, True, "a"):
        with pytest.raises(TypeError, match=r"a position, a whole number"):
            pop[place]  # type: ignore[index]
    for members in (np.ones(2, bool), [[0, 1]], [0.5], [3]):
        with pytest.raises(IndexError, match=r"places below 3, or a mask of that length"):
            pop.drop(members)
    with pytest.raises(CarpoolError, match=r"keep_width=True or keep_width=False"):
        pop.drop([0], keep_width=1)  # type: ignore[arg-type]
    with pytest.raises(CarpoolError, match=r"each=True or each=False"):
        pop.step((np.ones((8, 3)), np.ones((8, 1))), each="yes")  # type: ignore[arg-type]
    assert len(pop) == 3


@pytest.mark.parametrize(("seed", "step"), [(0.5, 0), (True, 0), (0, -1), (0, 1.0), ("0", 0)])
def test_the_key_of_no_step(seed: Any, step: Any):
    with pytest.raises(CarpoolError, match=r"seed that is a whole number|step of at least 0"):
        step_key(seed, step)
