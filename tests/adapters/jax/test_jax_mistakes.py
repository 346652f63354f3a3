"""The most common mistakes with JAX: each gets one error that says what was expected, what came and what to do."""

from __future__ import annotations

from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import jax_loops as loops
import numpy as np
import optax
import pytest

import carpool
from carpool.errors import CarpoolError, DataError, LossError, ModelError, OptimizerError
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


# Data that the model or the loss does not take, and what its factory takes

X, Y = np.ones((8, 6), "float32"), np.zeros(8, "int32")


def cross_entropy(prediction: Any, target: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(prediction, target).mean()


def job(name: str = "a", **options: Any) -> carpool.Job:
    settings = {"model": linear, "data": (X, Y), "loss": cross_entropy, "optimizer": optax.sgd(0.1)}
    return carpool.Job(**{**settings, "name": name, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"data": (X[:, :5], Y)},
            "data of the shape that the model and the loss take. Received: x of (8, 5)",
        ),
        (
            {"data": (X, Y.astype("float32"))},
            "class numbers, of an integer type (int64 in torch). Received: x of",
        ),
    ],
)
def test_data_that_does_not_fit_is_one_clear_error(
    options: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(DataError) as caught:
        carpool.train([job(**options), job("b", **options)], device="cpu", reporters=[])
    assert str(caught.value).startswith("Job 'a': Expected ")
    assert said in str(caught.value)
    assert caught.value.__cause__ is not None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("factory", "received"),
    [
        (lambda: linear(jax.random.key(0)), "lambda, which takes none"),
        (lambda key, width: linear(key), "lambda, which also wants width"),
    ],
)
def test_a_factory_takes_a_key(factory: Any, received: str):
    expected = rf"^Job 'a': Expected a function of a key alone that makes a model\. Received: {received}\."
    with pytest.raises(ModelError, match=expected):
        planned(job(model=factory))


def test_an_optimizer_that_was_not_called():
    with pytest.raises(OptimizerError, match=r"^Job 'a': Expected an optax optimizer.*optax\.adam\(1e-3\)"):
        planned(job(optimizer=optax.adam))


# Every argument of the public functions

LOOKED_AT: dict[str, set[str]] = {
    "Model": {"parameters", "state"},  # anything at all: the function that applies them knows
    "Population.step": {"batch"},  # JAX says what is wrong with it
    "Population.steps": {"batches"},
    "Population.predict": {"inputs"},
}
"""Arguments that no table of these tests has."""
TESTED: dict[str, set[str]] = {
    "population": {word for word, *_ in TABLE},
    "step_key": {"seed", "step"},  # test_the_key_of_no_step
    "Model": {"apply"},  # test_a_model_is_applied_by_a_function
    "Population.step": {"each"},  # test_places_in_a_population
    "Population.steps": {"each"},
    "Population.optimizer": {"place"},
    "Population.drop": {"members", "keep_width"},
    "Population.copy": {"source", "target"},
}


def public() -> dict[str, Any]:
    methods = {
        f"Population.{name}": method
        for name, method in vars(carpool.jax.Population).items()
        if callable(method) and not name.startswith("_")
    }
    return {"population": population, "step_key": step_key, "Model": Model, **methods}


@pytest.mark.parametrize("name", public())
def test_every_argument_is_looked_at(name: str):
    wanted = set(signature(public()[name]).parameters) - {"self"}
    assert wanted == LOOKED_AT.get(name, set()) | TESTED.get(name, set())


@pytest.mark.parametrize("apply", [None, 3, "relu", [max]])
def test_a_model_is_applied_by_a_function(apply: Any):
    with pytest.raises(ModelError, match=r"Expected apply to be a function"):
        Model({"w": X}, apply)


def test_places_that_are_copied_or_looked_at():
    pop = population(line, squares, optax.sgd(0.1), keys=3)
    for source, target in ((3, 0), (0, "a"), ([0, 1], 2), (0, [1, 1])):
        with pytest.raises((IndexError, CarpoolError), match=r"places below 3|one source for each target"):
            pop.copy(source, target)
    with pytest.raises(TypeError, match=r"a position, a whole number"):
        pop.optimizer(0.5)  # type: ignore[arg-type]
    with pytest.raises(CarpoolError, match=r"each=True or each=False"):
        pop.steps((np.ones((1, 8, 3)), np.ones((1, 8, 1))), each=1)  # type: ignore[arg-type]
