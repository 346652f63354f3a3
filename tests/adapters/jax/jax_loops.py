"""Data, and the training loops that people write by hand with optax, Flax and Equinox: what carpool's jobs are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import carpool
from carpool.jax import step_key

LENGTH, SIZE, EPOCHS = 64, 32, 2
_numbers = np.random.default_rng(0)
X = _numbers.normal(size=(LENGTH, 6)).astype("float32")
Y = _numbers.integers(0, 3, LENGTH)
IMAGES = _numbers.normal(size=(LENGTH, 8, 8, 1)).astype("float32")
WORDS = _numbers.integers(0, 11, (LENGTH, 5))
SERIES = _numbers.normal(size=(LENGTH, 5, 4)).astype("float32")


def loss(prediction: Any, target: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(prediction, target).mean()


def job(model: Any, **options: Any) -> carpool.Job:
    said = {} if "step" in options else {"loss": loss}
    given: dict[str, Any] = {
        "data": (X, Y),
        "optimizer": optax.adam(1e-2),
        "epochs": EPOCHS,
        "batch_size": SIZE,
        "seed": 3,
        **said,
        **options,
    }
    return carpool.Job(model, given.pop("data"), **given)


def trained(*jobs: carpool.Job, **options: Any) -> list[carpool.Result]:
    results = carpool.train(jobs, reporters=[], device="cpu", **options)
    return list(results)


def batches(seed: int = 3, x: Any = X, y: Any = Y, epochs: int = EPOCHS) -> Iterator[tuple[Any, Any, Any]]:
    """(x, y, key) of each step, as the documents say."""
    step = 0
    for epoch in range(epochs):
        order = carpool.batch_order(seed, epoch, len(x))
        for begin in range(0, len(x), SIZE):
            chosen = order[begin : begin + SIZE]
            yield x[chosen], y[chosen], step_key(seed, step)
            step += 1


def averaged(losses: list[float], epochs: int = EPOCHS) -> list[float]:
    """The mean of each epoch's losses, all of one batch size."""
    return [float(np.mean(part)) for part in np.split(np.asarray(losses), epochs)]


def optax_loop(
    parameters: Any, objective: Callable[..., Any], tx: Any, state: Any = None, **reading: Any
) -> tuple[Any, Any, list[float]]:
    """`objective(parameters, x, y, key)`; parameters, optimizer's state and losses afterwards."""
    state = tx.init(parameters) if state is None else state
    losses = []
    gradient = jax.jit(jax.value_and_grad(objective))
    update = jax.jit(tx.update)
    for x, y, key in batches(**reading):
        value, slopes = gradient(parameters, x, y, key)
        updates, state = update(slopes, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        losses.append(float(value))
    return parameters, state, losses


def held_loop(
    parameters: Any, held: Any, objective: Callable[..., Any], tx: Any, **reading: Any
) -> tuple[Any, Any, list[float]]:
    """`objective(parameters, held, x, y, key) -> loss, held`; parameters, what is held, and losses afterwards."""
    state, losses = tx.init(parameters), []
    gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))
    update = jax.jit(tx.update)
    for x, y, key in batches(**reading):
        (value, held), slopes = gradient(parameters, held, x, y, key)
        updates, state = update(slopes, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        losses.append(float(value))
    return parameters, held, losses


def nnx_loop(model: Any, tx: Any, optimizer: Any = None, **reading: Any) -> tuple[Any, list[float]]:
    """NNX' own loop; the module is changed in place."""
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param) if optimizer is None else optimizer

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, slopes = nnx.value_and_grad(lambda model: loss(model(x), y))(model)
        optimizer.update(model, slopes)
        return value

    return optimizer, [float(step(model, optimizer, x, y)) for x, y, _ in batches(**reading)]


def equinox_loop(model: Any, tx: Any, **reading: Any) -> tuple[Any, Any, list[float]]:
    """Equinox' own loop for modules that take one sample and a key."""
    state, losses = tx.init(eqx.filter(model, eqx.is_inexact_array)), []

    @eqx.filter_jit
    def step(model: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        keys = jax.random.split(key, len(x))

        def objective(model: Any) -> Any:
            return loss(jax.vmap(lambda one, key: model(one, key=key))(x, keys), y)

        value, slopes = eqx.filter_value_and_grad(objective)(model)
        updates, state = tx.update(slopes, state, eqx.filter(model, eqx.is_inexact_array))
        return value, eqx.apply_updates(model, updates), state

    for x, y, key in batches(**reading):
        value, model, state = step(model, state, x, y, key)
        losses.append(float(value))
    return model, state, losses


def few(kinds: Mapping[str, Any]) -> list[Any]:
    """The first two of many cases; the others, which each compile anew, are for the slow suite."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (place > 1)) for place, kind in enumerate(kinds)]


def close(one: Any, other: Any) -> None:
    """Two nests hold the same, within what is promised of float32."""
    own, expected = map(_leaves, (one, other))
    assert len(own) == len(expected) > 0
    for a, b in zip(own, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def _leaves(nest: Any) -> list[np.ndarray]:
    if isinstance(nest, nnx.Module):
        nest = nnx.state(nest)
    leaves = [leaf for leaf in jax.tree.leaves(nest) if eqx.is_array_like(leaf)]
    keys = [jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for leaf, is_key in zip(leaves, keys, strict=True)
    ]


def three(made: Callable[[float], Any]) -> Iterator[tuple[float, int, float, carpool.Result]]:
    """Three members of one stack, each with a rate, a seed and a dropout rate of its own: what they were given, and their results.

    `made` gives the model, or its factory, with a dropout rate.
    """
    given = [(1e-3, 0, 0.1), (1e-2, 1, 0.3), (3e-2, 2, 0.6)]
    options = {"validation_data": (X[:24], Y[:24])}
    jobs = [job(made(drop), optimizer=optax.adam(rate), seed=seed, **options) for rate, seed, drop in given]
    for own, result in zip(given, trained(*jobs), strict=True):
        assert result.strategy == "fused"
        yield *own, result
