"""Parameters as nests and as `carpool.jax.Model`, beside a hand-written optax loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_loops as loops
import numpy as np
import optax
import pytest

import carpool
from carpool.jax import Model


def parameters(key: Any) -> dict[str, Any]:
    a, b = jax.random.split(key)
    return {
        "one": jax.random.normal(a, (6, 8)) * 0.3,
        "two": {"w": jax.random.normal(b, (8, 3)) * 0.3, "b": jnp.zeros(3)},
    }


def apply(own: Any, x: Any) -> Any:
    return jax.nn.relu(x @ own["one"]) @ own["two"]["w"] + own["two"]["b"]


def dropped(own: Any, x: Any, *, key: Any, train: bool) -> Any:
    return apply(own, x * jax.random.bernoulli(key, 0.5, x.shape) * 2 if train else x)


def centred(own: Any, state: Any, x: Any, train: bool) -> Any:
    """A statistic and a count, beside the parameters."""
    mean = 0.9 * state["mean"] + 0.1 * x.mean(0) if train else state["mean"]
    return apply(own, x - mean), {"mean": mean, "count": state["count"] + 1}


STATE = {"mean": jnp.zeros(6), "count": jnp.array(0)}
VALIDATION = (loops.X[:24], loops.Y[:24])


def plainly(own: Any, x: Any, y: Any, key: Any) -> Any:
    return loops.loss(apply(own, x), y)


def test_a_model_ends_where_a_loop_ends():
    result = loops.trained(loops.job(lambda key: Model(parameters(key), apply)))[0]
    own, state, losses = loops.optax_loop(parameters(jax.random.key(3)), plainly, optax.adam(1e-2))
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    assert isinstance(result.model, Model)
    loops.close(result.model.parameters, own)
    loops.close(result.model(loops.X[:4]), apply(own, loops.X[:4]))
    assert jax.tree.structure(result.optimizer) == jax.tree.structure(state)
    loops.close(result.optimizer, state)


def test_a_nest_with_a_step_comes_back_as_such_a_nest():
    class Held(dict):
        """No kind of nest that JAX knows."""

    given = {**parameters(jax.random.key(3)), "scale": 2.0, "count": jnp.arange(3)}

    def step(own: Any, batch: Any, key: Any) -> Any:
        x, y = batch
        return loops.loss(dropped(own, x, key=key, train=True) * own["scale"] / 2, y + 0 * own["count"][0])

    def objective(own: Any, x: Any, y: Any, key: Any) -> Any:
        return loops.loss(dropped(own, x, key=key, train=True), y)

    result = loops.trained(loops.job(given, step=step))[0]
    own, _, losses = loops.optax_loop(parameters(jax.random.key(3)), objective, optax.adam(1e-2))
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    assert result.model["scale"] == 2.0
    np.testing.assert_array_equal(result.model["count"], given["count"])
    loops.close({word: result.model[word] for word in own}, own)
    with pytest.raises(carpool.errors.ModelError, match="a model of torch, JAX, Keras or TensorFlow"):
        loops.trained(loops.job(Held(given), step=step))


def test_a_key_and_the_mode_are_given_to_who_asks_for_them():
    result = loops.trained(
        loops.job(lambda key: Model(parameters(key), dropped), validation_data=VALIDATION)
    )[0]

    def objective(own: Any, x: Any, y: Any, key: Any) -> Any:
        return loops.loss(dropped(own, x, key=key, train=True), y)

    own, _, _ = loops.optax_loop(parameters(jax.random.key(3)), objective, optax.adam(1e-2))
    loops.close(result.model.parameters, own)
    expected = loops.loss(apply(own, VALIDATION[0]), VALIDATION[1])
    assert result.history["val_loss"][-1] == pytest.approx(float(expected), rel=1e-4)


def test_a_state_goes_along_and_validation_leaves_it():
    def objective(own: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        made, state = centred(own, state, x, train=True)
        return loops.loss(made, y), state

    def step(model: Any, batch: Any, train: bool) -> Any:
        made, state = model(batch[0], train=train)
        return loops.loss(made, batch[1]), state

    given = Model(parameters(jax.random.key(3)), centred, STATE)
    own, state, losses = loops.held_loop(given.parameters, STATE, objective, optax.adam(1e-2))
    shown = loops.loss(centred(own, state, VALIDATION[0], train=False)[0], VALIDATION[1])
    for options in ({}, {"step": step}):
        result = loops.trained(loops.job(given, validation_data=VALIDATION, **options))[0]
        np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
        loops.close((result.model.parameters, result.model.state), (own, state))
        assert int(result.model.state["count"]) == 4
        assert result.history["val_loss"][-1] == pytest.approx(float(shown), rel=1e-4)


def test_models_that_apply_their_parameters_differently_are_not_mistaken_for_each_other():
    def other(own: Any, x: Any) -> Any:
        return jnp.tanh(x @ own["one"]) @ own["two"]["w"] + own["two"]["b"]

    def otherwise(own: Any, x: Any, y: Any, key: Any) -> Any:
        return loops.loss(other(own, x), y)

    jobs = [loops.job(lambda key, f=f: Model(parameters(key), f)) for f in (apply, other)]
    for result, objective in zip(loops.trained(*jobs), (plainly, otherwise), strict=True):
        own, _, _ = loops.optax_loop(parameters(jax.random.key(3)), objective, optax.adam(1e-2))
        loops.close(result.model.parameters, own)


def test_a_stack_goes_on_as_one_longer_loop_and_several_inputs_are_several_arguments():
    def two(own: Any, x: Any, more: Any) -> Any:
        return apply(own, x + more)

    tx = [optax.adam(rate) for rate in (1e-3, 1e-2, 3e-2)]
    data = ((loops.X, loops.X * 0.1), loops.Y)

    def jobs(models: Any, optimizers: Any) -> list[carpool.Job]:
        each = zip(models, optimizers, strict=True)
        return [loops.job(m, optimizer=o, seed=seed, data=data) for seed, (m, o) in enumerate(each)]

    first = loops.trained(*jobs([lambda key: Model(parameters(key), two)] * 3, tx))
    again = [(one, result.optimizer) for one, result in zip(tx, first, strict=True)]
    for seed, result in enumerate(loops.trained(*jobs([result.model for result in first], again))):
        assert result.strategy == "fused"
        own, state = parameters(jax.random.key(seed)), None
        for _ in range(2):
            own, state, _ = loops.optax_loop(
                own, plainly, tx[seed], state, seed=seed, x=loops.X * np.float32(1.1)
            )
        loops.close(result.model.parameters, own)


def test_a_last_batch_that_is_smaller_counts_by_its_samples():
    x, y = loops.X[:40], loops.Y[:40]
    result = loops.trained(loops.job(lambda key: Model(parameters(key), apply), data=(x, y), epochs=1))[0]
    own, _, losses = loops.optax_loop(
        parameters(jax.random.key(3)), plainly, optax.adam(1e-2), x=x, y=y, epochs=1
    )
    loops.close(result.model.parameters, own)
    assert result.history["loss"][0] == pytest.approx((32 * losses[0] + 8 * losses[1]) / 40, rel=1e-4)
