"""Equinox modules, with and without a state, beside Equinox' own loop."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax_loops as loops
import numpy as np
import optax
import pytest

import carpool


class Dense(eqx.Module):
    one: eqx.nn.Linear
    drop: eqx.nn.Dropout
    two: eqx.nn.Linear

    def __init__(self, key: Any, rate: float = 0.4) -> None:
        a, b = jax.random.split(key)
        self.one, self.two = eqx.nn.Linear(6, 8, key=a), eqx.nn.Linear(8, 3, key=b)
        self.drop = eqx.nn.Dropout(rate)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return self.two(self.drop(jax.nn.relu(self.one(x)), key=key))


class Convolved(eqx.Module):
    one: eqx.nn.Conv2d
    two: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        a, b = jax.random.split(key)
        self.one, self.two = eqx.nn.Conv2d(1, 4, 3, key=a), eqx.nn.Linear(36, 3, key=b)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        x = eqx.nn.AvgPool2d(2, 2)(jax.nn.relu(self.one(x.transpose(2, 0, 1))))
        return self.two(x.reshape(-1))


class Attending(eqx.Module):
    words: eqx.nn.Embedding
    attend: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        a, b, c = jax.random.split(key, 3)
        self.words, self.norm = eqx.nn.Embedding(11, 8, key=a), eqx.nn.LayerNorm(8)
        self.attend, self.out = eqx.nn.MultiheadAttention(2, 8, key=b), eqx.nn.Linear(8, 3, key=c)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        x = jax.vmap(self.words)(x)
        return self.out(jax.vmap(self.norm)(x + self.attend(x, x, x)).mean(0))


class Recurrent(eqx.Module):
    cell: Any
    out: eqx.nn.Linear

    def __init__(self, key: Any, kind: Any = eqx.nn.GRUCell) -> None:
        a, b = jax.random.split(key)
        self.cell, self.out = kind(4, 8, key=a), eqx.nn.Linear(8, 3, key=b)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        begun = jnp.zeros(8)
        begun = (begun, begun) if isinstance(self.cell, eqx.nn.LSTMCell) else begun
        end, _ = jax.lax.scan(lambda held, one: (self.cell(one, held), None), begun, x)
        return self.out(end[0] if isinstance(end, tuple) else end)


class Normed(eqx.Module):
    """With a state."""

    one: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    two: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        a, b = jax.random.split(key)
        self.one = eqx.nn.Linear(6, 8, use_bias=False, key=a)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode="batch")
        self.two = eqx.nn.Linear(8, 3, key=b)

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.norm(self.one(x), state)
        return self.two(jax.nn.relu(x)), state


KINDS = {
    "dense": (Dense, loops.X),
    "layers": (lambda key: eqx.nn.MLP(6, 3, 8, 2, key=key), loops.X),
    "convolved": (Convolved, loops.IMAGES),
    "attending": (Attending, loops.WORDS),
    "recurrent": (lambda key: Recurrent(key, eqx.nn.LSTMCell), loops.SERIES),
    "gated": (Recurrent, loops.SERIES),
}


@pytest.mark.parametrize("kind", loops.few(KINDS))
def test_a_module_ends_where_its_own_loop_ends_and_its_kind_comes_back(kind: str):
    made, x = KINDS[kind]
    model = made(jax.random.key(3))
    hand, state, losses = loops.equinox_loop(model, optax.adam(1e-2), x=x)
    result = loops.trained(loops.job(model, data=(x, loops.Y)))[0]
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    assert type(result.model) is type(model)
    assert jax.tree.structure(result.model) == jax.tree.structure(model)
    loops.close(result.model, hand)
    assert jax.tree.structure(result.optimizer) == jax.tree.structure(state)
    loops.close(result.optimizer, state)
    shown = eqx.nn.inference_mode(result.model)(x[0])
    loops.close(shown, eqx.nn.inference_mode(hand)(x[0]))


def test_a_factory_is_given_the_seeds_key_and_a_step_the_module_and_the_steps_key():
    def step(model: Any, batch: Any, key: Any) -> Any:
        x, y = batch
        return loops.loss(jax.vmap(lambda one, key: model(one, key=key))(x, jax.random.split(key, len(x))), y)

    result = loops.trained(loops.job(Dense, step=step))[0]
    hand, _, losses = loops.equinox_loop(Dense(jax.random.key(3)), optax.adam(1e-2))
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    loops.close(result.model, hand)


def stateful(key: Any) -> Any:
    return eqx.nn.make_with_state(Normed)(key)


def stateful_by_hand(seed: int = 3) -> tuple[Any, Any, list[float]]:
    module, state = stateful(jax.random.key(seed))
    trained, static = eqx.partition(module, eqx.is_inexact_array)

    def objective(trained: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        module = eqx.combine(trained, static)
        each = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        made, state = each(x, state)
        return loops.loss(made, y), state

    trained, state, losses = loops.held_loop(trained, state, objective, optax.adam(1e-2), seed=seed)
    return eqx.combine(trained, static), state, losses


def test_a_module_and_its_state_come_back_as_a_pair_and_validation_uses_the_state():
    validation = (loops.X[:24], loops.Y[:24])
    result = loops.trained(loops.job(stateful(jax.random.key(3)), validation_data=validation))[0]
    module, state, losses = stateful_by_hand()
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    own, held = result.model
    assert isinstance(own, Normed)
    assert isinstance(held, eqx.nn.State)
    loops.close((own, held), (module, state))
    shown, _ = jax.vmap(eqx.nn.inference_mode(own), in_axes=(0, None), out_axes=(0, None))(
        validation[0], held
    )
    assert result.history["val_loss"][-1] == pytest.approx(float(loops.loss(shown, validation[1])), rel=1e-4)


def test_the_step_of_a_pair_returns_the_state_beside_its_loss():
    def step(model: Any, batch: Any) -> Any:
        (module, state), (x, y) = model, batch
        each = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        made, state = each(x, state)
        return {"loss": loops.loss(made, y)}, state

    result = loops.trained(loops.job(stateful, step=step))[0]
    module, state, losses = stateful_by_hand()
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    loops.close(result.model, (module, state))


def test_a_stack_with_rates_seeds_and_dropout_of_their_own_equals_each_alone():
    for rate, seed, drop, result in loops.three(lambda drop: lambda key: Dense(key, drop)):
        assert result.model.drop.p == drop
        hand, _, losses = loops.equinox_loop(Dense(jax.random.key(seed), drop), optax.adam(rate), seed=seed)
        np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
        loops.close(result.model, hand)
        expected = loops.loss(jax.vmap(eqx.nn.inference_mode(hand))(loops.X[:24]), loops.Y[:24])
        assert result.history["val_loss"][-1] == pytest.approx(float(expected), rel=1e-4)


def test_going_on_equals_one_longer_loop():
    tx, model = optax.adam(1e-2), stateful(jax.random.key(3))
    first = loops.trained(loops.job(model, optimizer=tx))[0]
    second = loops.trained(loops.job(first.model, optimizer=(tx, first.optimizer)))[0]
    longer = loops.trained(loops.job(model, optimizer=tx, shuffle=False, epochs=2))[0]
    twice = loops.trained(loops.job(model, optimizer=tx, shuffle=False, epochs=1))[0]
    twice = loops.trained(loops.job(twice.model, optimizer=(tx, twice.optimizer), shuffle=False, epochs=1))[0]
    loops.close(twice.model, longer.model)
    assert float(optax.tree.get(second.optimizer, "count")) == 8


def test_numpy_arrays_in_a_module_are_not_trained():
    class Scaled(eqx.Module):
        scale: np.ndarray
        out: eqx.nn.Linear

        def __call__(self, x: Any) -> Any:
            return self.out(x * self.scale)

    model = Scaled(np.full(6, 2.0, "float32"), eqx.nn.Linear(6, 3, key=jax.random.key(0)))
    result = loops.trained(loops.job(model))[0]
    np.testing.assert_array_equal(result.model.scale, model.scale)
    assert not np.allclose(result.model.out.weight, model.out.weight)


def test_a_module_that_a_job_failed_with_is_as_it_was():
    def breaks(prediction: Any, target: Any) -> Any:
        raise ZeroDivisionError("mine")

    model = Dense(jax.random.key(0))
    before = jax.tree.map(jnp.array, eqx.filter(model, eqx.is_array))
    bad, good = loops.trained(loops.job(model, loss=breaks), loops.job(model))
    assert isinstance(bad.error, ZeroDivisionError)
    assert good.outcome is carpool.Outcome.COMPLETED
    jax.tree.map(np.testing.assert_array_equal, eqx.filter(model, eqx.is_array), before)
