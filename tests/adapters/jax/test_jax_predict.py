"""Predictions of many JAX models in one call equal those of a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_zoo import batch_norm, data, dropout, mlp, residual

import carpool
from carpool.adapters.jax import programs
from carpool.errors import DataError, ModelError


def test_models_of_one_structure_are_one_launch_and_equal_a_loop():
    x, _ = data(False)
    models = {f"{make.__name__} {i}": make(jax.random.key(i)) for make in (mlp, residual) for i in range(3)}
    before = set(programs._programs)
    outputs = carpool.predict(models, x, device="cpu")
    assert len(set(programs._programs) - before) == 2
    for name, model in models.items():
        np.testing.assert_allclose(outputs[name], model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [None, 16])
def test_in_evaluation_mode_and_in_batches(size):
    x, _ = data(False)
    noisy, normed = dropout(jax.random.key(0)), batch_norm(jax.random.key(1))
    first, second = carpool.predict([noisy, normed], x, batch_size=size, device="cpu")
    np.testing.assert_allclose(first, noisy(x, key=None, train=False), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, normed(x, train=False)[0], rtol=1e-5, atol=1e-6)


def test_equinox_and_flax_modules():
    import equinox as eqx
    from flax import nnx

    x, _ = data(False)
    mapped = eqx.nn.MLP(6, 3, 8, 1, key=jax.random.key(0))
    module = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    first, second = carpool.predict([mapped, module], x, device="cpu")
    np.testing.assert_allclose(first, jax.vmap(mapped)(jnp.asarray(x)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, module(jnp.asarray(x)), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_predicted_is_said():
    with pytest.raises(ModelError, match="a JAX model that can be called"):
        carpool.predict([{"w": jnp.ones(3)}], np.ones((2, 3)), device="cpu")
    with pytest.raises(DataError, match="inputs of one length"):
        carpool.predict([mlp(jax.random.key(0))], (np.ones((2, 6)), np.ones((3, 6))), device="cpu")
