"""Flax Linen modules: bound or not, beside loops over `init` and `apply`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax_loops as loops
import numpy as np
import optax
import pytest


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.relu(nn.Dense(8)(x)))


class Normed(nn.Module):
    rate: float = 0.4

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8, use_bias=False)(x))
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=not train)(nn.relu(x)))


class Convolved(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(len(x), -1))


class Attending(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Embed(11, 8)(x)
        return nn.Dense(3)(nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(2)(x)).mean(1))


class Recurrent(nn.Module):
    cell: Any = nn.OptimizedLSTMCell

    @nn.compact
    def __call__(self, x: Any) -> Any:
        run: Any = nn.RNN(self.cell(8))
        return nn.Dense(3)(run(x)[:, -1])


KINDS = {
    "dense": (Dense(), loops.X),
    "normed": (Normed(), loops.X),
    "convolved": (Convolved(), loops.IMAGES),
    "attending": (Attending(), loops.WORDS),
    "recurrent": (Recurrent(), loops.SERIES),
    "gated": (Recurrent(nn.GRUCell), loops.SERIES),
}


def by_hand(module: Any, x: Any = loops.X, tx: Any = None, seed: int = 3) -> tuple[Any, Any, list[float]]:
    """Variables, by collection, and losses, after init and apply as people write them."""
    mode: Any = {"train": True} if isinstance(module, Normed) else {}
    before: Any = dict.fromkeys(mode, False)
    variables = module.init(jax.random.key(seed), x[:1], **before)
    held = {name: value for name, value in variables.items() if name != "params"}

    def objective(parameters: Any, held: Any, x: Any, y: Any, key: Any) -> Any:
        made, held = module.apply(
            {"params": parameters, **held}, x, **mode, rngs={"dropout": key}, mutable=list(held)
        )
        return loops.loss(made, y), held

    tx = optax.adam(1e-2) if tx is None else tx
    return loops.held_loop(variables["params"], held, objective, tx, x=x, seed=seed)


@pytest.mark.parametrize("kind", loops.few(KINDS))
def test_an_unbound_module_ends_where_a_loop_ends_and_comes_back_bound(kind: str):
    module, x = KINDS[kind]
    parameters, held, losses = by_hand(module, x)
    result = loops.trained(loops.job(module, data=(x, loops.Y)))[0]
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    assert type(result.model) is type(module)
    assert result.model.scope is not None
    loops.close(result.model.variables["params"], parameters)
    if held:
        loops.close({name: result.model.variables[name] for name in held}, held)
    mode = {"train": False} if kind == "normed" else {}
    loops.close(result.model(x[:4], **mode), module.apply({"params": parameters, **held}, x[:4], **mode))


def test_a_bound_module_and_a_factory_begin_as_they_are():
    made = Dense().init(jax.random.key(3), loops.X[:1])
    parameters, _, _ = by_hand(Dense())
    bound, factory = Dense().bind(made), lambda key: Dense().bind(Dense().init(key, loops.X[:1]))
    for model in (bound, factory):
        result = loops.trained(loops.job(model))[0]
        loops.close(result.model.variables["params"], parameters)
    jax.tree.map(np.testing.assert_array_equal, bound.variables, made)


def test_a_step_calls_the_module_and_its_collections_change():
    def step(model: Any, batch: Any, train: bool) -> Any:
        x, y = batch
        return {"loss": loops.loss(model(x, train=train), y)}

    validation = (loops.X[:24], loops.Y[:24])
    result = loops.trained(loops.job(Normed(), step=step, validation_data=validation))[0]
    parameters, held, losses = by_hand(Normed())
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    loops.close(result.model.variables, {"params": parameters, **held})
    shown = Normed().apply({"params": parameters, **held}, loops.X[:24], train=False)
    assert result.history["val_loss"][-1] == pytest.approx(float(loops.loss(shown, loops.Y[:24])), rel=1e-4)


@pytest.mark.slow
def test_a_stack_with_rates_seeds_and_dropout_of_their_own_equals_each_alone():
    for rate, seed, drop, result in loops.three(lambda drop: Normed(drop)):
        parameters, held, losses = by_hand(Normed(drop), tx=optax.adam(rate), seed=seed)
        np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
        loops.close(result.model.variables, {"params": parameters, **held})
        expected = loops.loss(result.model(loops.X[:24], train=False), loops.Y[:24])
        assert result.history["val_loss"][-1] == pytest.approx(float(expected), rel=1e-4)


def test_going_on_equals_one_longer_loop():
    tx = optax.adam(1e-2)
    first = loops.trained(loops.job(Dense(), optimizer=tx))[0]
    second = loops.trained(loops.job(first.model, optimizer=(tx, first.optimizer)))[0]
    made = Dense().init(jax.random.key(3), loops.X[:1])["params"]

    def objective(parameters: Any, x: Any, y: Any, key: Any) -> Any:
        return loops.loss(Dense().apply({"params": parameters}, x), y)

    middle, state, _ = loops.optax_loop(made, objective, tx)
    end, state, _ = loops.optax_loop(middle, objective, tx, state)
    loops.close(second.model.variables["params"], end)
    loops.close(second.optimizer, state)


def test_a_random_layer_with_a_name_of_its_own_draws_from_the_steps_key():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(3)(x + jax.random.normal(self.make_rng("noise"), x.shape))

    made = Noisy().init(jax.random.key(3), loops.X[:1])["params"]

    def objective(parameters: Any, x: Any, y: Any, key: Any) -> Any:
        return loops.loss(Noisy().apply({"params": parameters}, x, rngs={"params": key}), y)

    parameters, _, _ = loops.optax_loop(made, objective, optax.adam(1e-2))
    loops.close(loops.trained(loops.job(Noisy()))[0].model.variables["params"], parameters)
