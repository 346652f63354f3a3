"""One factory of many jobs: their models are made at once, bit by bit as each would be alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax_loops as loops
import numpy as np
import optax
import pytest
from flax import nnx
from jax_zoo import batch_norm, convolution, mlp

import carpool
from carpool.adapters.jax.factories import FEWEST, Factories
from carpool.adapters.jax.forms import form_of
from carpool.adapters.jax.keys import init_key
from carpool.adapters.jax.train import JaxAdapter
from carpool.jax import Model


def jobs(factory: Any, count: int = FEWEST, **options: Any) -> list[carpool.Job]:
    return [loops.job(factory, optimizer=optax.adam(1e-2), seed=7 * i, **options) for i in range(count)]


def parts_of(asked: list[carpool.Job]) -> list[Any]:
    factories = Factories()
    factories.expect(asked)
    return [factories.made(job) for job in asked]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner, self.drop = nnx.Linear(6, 8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.norm, self.outer = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


def of_nnx(key: Any) -> Net:
    return Net(nnx.Rngs(key))


@pytest.mark.parametrize("factory", [mlp, convolution, batch_norm, of_nnx])
def test_every_member_has_the_bits_of_its_own_call(factory):
    asked = jobs(factory)
    for job, made in zip(asked, parts_of(asked), strict=True):
        assert made is not None
        model = factory(init_key(job.seed))
        form = form_of(model)
        assert form is not None
        alone = jax.device_get(form.split(model))
        assert jax.tree.structure(alone) == jax.tree.structure(made[1])
        for own, together in zip(jax.tree.leaves(alone), jax.tree.leaves(made[1]), strict=True):
            assert own.dtype == together.dtype
            assert own.tobytes() == together.tobytes()


def test_a_factory_of_many_is_called_a_few_times():
    calls = []

    def factory(key: Any) -> Model:
        calls.append(key)
        return mlp(key)

    assert all(made is not None for made in parts_of(jobs(factory, 40)))
    assert len(calls) < 5


def drawn(key: Any) -> Model:
    """A factory that does not go by its key alone."""
    return Model({"w": jnp.asarray(np.random.default_rng().normal(size=(6, 3)), jnp.float32)}, _product)


def looked(key: Any) -> Model:
    """A factory that looks at its key's numbers, which no map can."""
    width = 4 + int(jax.random.key_data(key)[-1]) % 2
    return Model({"w": jnp.ones((6, width)), "v": jnp.ones((width, 3))}, lambda p, x: x @ p["w"] @ p["v"])


def _product(p: Any, x: Any) -> Any:
    return x @ p["w"]


@pytest.mark.parametrize("factory", [drawn, looked])
def test_what_cannot_be_made_together_is_made_one_by_one(factory):
    assert parts_of(jobs(factory)) == [None] * FEWEST
    results = loops.trained(*jobs(factory, epochs=1))
    assert all(result.error is None for result in results)
    if factory is drawn:
        assert len({np.asarray(result.model.parameters["w"]).tobytes() for result in results}) == FEWEST


def test_few_jobs_call_it_themselves():
    assert parts_of(jobs(mlp, FEWEST - 1)) == [None] * (FEWEST - 1)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [mlp, of_nnx])
def test_made_together_and_alone_they_end_alike(factory):
    asked = jobs(factory)
    together = loops.trained(*asked)
    (alone,) = loops.trained(asked[3])
    assert type(together[3].model) is type(alone.model)
    assert together[3].history == alone.history
    assert len({id(result.model) for result in together}) == FEWEST
    x = jnp.asarray(loops.X[:5])
    np.testing.assert_allclose(together[3].model(x), alone.model(x), rtol=1e-5, atol=1e-6)


def test_a_model_that_never_ran_is_handed_back_as_it_was_made():
    asked = [replace(job, name=str(i)) for i, job in enumerate(jobs(mlp))]
    adapter = JaxAdapter()
    adapter.expect(asked)
    adapter.describe(asked[0])
    left = adapter.trained(asked[0]).model
    assert isinstance(left, Model)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(left.parameters))
    loops.close(left.parameters, mlp(init_key(asked[0].seed)).parameters)
