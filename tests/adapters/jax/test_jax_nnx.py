"""Flax NNX modules: beside NNX' own loop, fused, and changed in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_loops as loops
import numpy as np
import optax
import pytest
from flax import nnx

import carpool


class Dense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one, self.two = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.two(nnx.relu(self.one(x)))


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.4) -> None:
        # A bias before the normalisation has a gradient of zero, and Adam makes steps of its rounding errors.
        self.one, self.two = nnx.Linear(6, 8, use_bias=False, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.two(self.drop(nnx.relu(self.norm(self.one(x)))))


class Convolved(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one, self.two = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.two(nnx.avg_pool(nnx.relu(self.one(x)), (2, 2), (2, 2)).reshape(len(x), -1))


class Attending(nnx.Module):
    """Words, attention between them and layer normalisation."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words, self.norm = nnx.Embed(11, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.words(x)
        return self.out(self.norm(x + self.attend(x)).mean(1))


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, cell: Any = nnx.LSTMCell) -> None:
        self.run: Any = nnx.RNN(cell(4, 8, rngs=rngs))
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.run(x)[:, -1])


def gated(rngs: nnx.Rngs) -> nnx.Module:
    return Recurrent(rngs, nnx.GRUCell)


KINDS = {
    "dense": (Dense, loops.X),
    "normed": (Normed, loops.X),
    "convolved": (Convolved, loops.IMAGES),
    "attending": (Attending, loops.WORDS),
    "recurrent": (Recurrent, loops.SERIES),
    "gated": (gated, loops.SERIES),
}


@pytest.mark.parametrize("kind", loops.few(KINDS))
def test_a_module_ends_where_its_own_loop_ends_and_is_the_object_that_came_in(kind: str):
    made, x = KINDS[kind]
    model, hand = made(nnx.Rngs(3)), made(nnx.Rngs(3))
    optimizer, losses = loops.nnx_loop(hand, optax.adam(1e-2), x=x)
    result = loops.trained(loops.job(model, data=(x, loops.Y)))[0]
    assert result.model is model
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    loops.close(model, hand)  # also its statistics and the counts of its random states
    loops.close(result.optimizer, optimizer.opt_state)
    model.eval()
    hand.eval()
    loops.close(result.model(x[:4]), hand(x[:4]))


def test_a_factory_is_given_the_seeds_key_and_a_step_the_module():
    def step(model: Any, batch: Any) -> Any:
        x, y = batch
        prediction = model(x)
        return {"loss": loops.loss(prediction, y), "right": (prediction.argmax(-1) == y).mean()}

    result = loops.trained(loops.job(lambda key: Normed(nnx.Rngs(key)), step=step))[0]
    hand = Normed(nnx.Rngs(jax.random.key(3)))
    _, losses = loops.nnx_loop(hand, optax.adam(1e-2))
    assert isinstance(result.model, Normed)
    assert set(result.history) == {"loss", "right"}
    np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
    loops.close(result.model, hand)


@pytest.mark.slow
def test_a_stack_with_rates_seeds_and_dropout_of_their_own_equals_each_alone():
    for rate, seed, drop, result in loops.three(lambda drop: lambda key: Normed(nnx.Rngs(key), drop)):
        hand = Normed(nnx.Rngs(jax.random.key(seed)), drop)
        _, losses = loops.nnx_loop(hand, optax.adam(rate), seed=seed)
        np.testing.assert_allclose(result.history["loss"], loops.averaged(losses), rtol=1e-4)
        loops.close(result.model, hand)
        hand.eval()
        expected = loops.loss(hand(loops.X[:24]), loops.Y[:24])
        assert result.history["val_loss"][-1] == pytest.approx(float(expected), rel=1e-4)


def test_going_on_equals_one_longer_loop():
    model, hand, tx = Normed(nnx.Rngs(3)), Normed(nnx.Rngs(3)), optax.adam(1e-2)
    first = loops.trained(loops.job(model, optimizer=tx))[0]
    second = loops.trained(loops.job(first.model, optimizer=(tx, first.optimizer)))[0]
    optimizer, _ = loops.nnx_loop(hand, tx)
    loops.nnx_loop(hand, tx, optimizer)
    assert second.model is model
    loops.close(model, hand)


def test_an_nnx_optimizer_is_used_updated_and_given_back():
    model, hand, tx = Dense(nnx.Rngs(3)), Dense(nnx.Rngs(3)), optax.adam(1e-2)
    own, expected = (nnx.Optimizer(m, tx, wrt=nnx.Param) for m in (model, hand))
    for _ in range(2):
        result = loops.trained(loops.job(model, optimizer=own))[0]
        loops.nnx_loop(hand, tx, expected)
        assert result.optimizer is own
        loops.close(nnx.state(own), nnx.state(expected))  # its count of steps too
        loops.close(model, hand)


@pytest.mark.slow
def test_a_worker_hands_module_and_optimizer_over():
    model, hand, tx = Normed(nnx.Rngs(3)), Normed(nnx.Rngs(3)), optax.adam(1e-2)
    own, expected = (nnx.Optimizer(m, tx, wrt=nnx.Param) for m in (model, hand))
    result = loops.trained(loops.job(model, optimizer=own), strategy="isolated")[0]
    loops.nnx_loop(hand, tx, expected)
    assert result.strategy == "isolated"
    assert result.model is model
    assert result.optimizer is own
    loops.close(model, hand)
    loops.close(nnx.state(own), nnx.state(expected))


def test_what_an_nnx_optimizer_is_for_is_all_that_is_trained():
    model: Any = nnx.LoRA(6, 2, 3, base_module=nnx.Linear(6, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    before = jnp.array(model.base_module.kernel[...])
    lora = jnp.array(model.lora_b[...])
    loops.trained(loops.job(model, optimizer=nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)))
    assert (model.base_module.kernel[...] == before).all()
    assert not np.allclose(model.lora_b[...], lora)


def test_validation_leaves_what_training_holds_alone():
    alone, beside = Normed(nnx.Rngs(3)), Normed(nnx.Rngs(3))
    loops.trained(loops.job(alone))
    loops.trained(loops.job(beside, validation_data=(loops.X[:24], loops.Y[:24])))
    for a, b in zip(
        *(jax.tree.leaves(nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.RngKey)))) for m in (alone, beside)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_a_mode_and_random_states_that_must_be_given_are():
    class Asks(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.out, self.drop = nnx.Linear(6, 3, rngs=rngs), nnx.Dropout(0.5)

        def __call__(self, x: Any, train: bool, rngs: nnx.Rngs) -> Any:
            return self.out(self.drop(x, deterministic=not train, rngs=rngs))

    validation = (loops.X[:24], loops.Y[:24])
    result = loops.trained(loops.job(Asks(nnx.Rngs(0)), validation_data=validation))[0]
    expected = loops.loss(result.model(loops.X[:24], False, None), loops.Y[:24])
    assert result.history["val_loss"][-1] == pytest.approx(float(expected), rel=1e-4)


def test_what_a_call_leaves_in_a_module_is_dropped_and_arrays_without_a_variable_are_held():
    class Leaves(nnx.Module):
        def __init__(self) -> None:
            self.out, self.calls = nnx.Linear(6, 3, rngs=nnx.Rngs(0)), jnp.array(0)

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            self.seen = nnx.Intermediate(x.mean())
            return self.out(x)

    model = Leaves()
    loops.trained(loops.job(model))
    assert int(model.calls) == 4
    assert not nnx.state(model, nnx.Intermediate)


def test_a_module_stays_as_it_is_when_its_job_fails():
    def breaks(model: Any, batch: Any) -> Any:
        model(batch[0])
        raise ZeroDivisionError("mine")

    model, other = Normed(nnx.Rngs(3)), Normed(nnx.Rngs(3))
    before = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    bad, good = loops.trained(loops.job(model, step=breaks), loops.job(other))
    assert isinstance(bad.error, ZeroDivisionError)
    assert bad.outcome is carpool.Outcome.FAILED
    assert good.outcome is carpool.Outcome.COMPLETED
    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert np.isfinite(model(loops.X[:2])).all()
