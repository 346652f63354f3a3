"""The step of `keras_fits.members` as a JAX programmer would write it: vmap over members, scan over steps, Adam in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_BETAS, _EPSILON = (0.9, 0.999), 1e-7


def by_hand(
    models: Sequence[Any], x: np.ndarray, y: np.ndarray, batch: int, epochs: int
) -> tuple[Callable[[Any], Any], Any]:
    """A function that runs all epochs of all members in one call, and the state that it starts from."""
    weights = [
        jnp.stack([jnp.asarray(np.asarray(model.trainable_variables[i])) for model in models])
        for i in range(4)
    ]
    zeros = [jnp.zeros_like(leaf) for leaf in weights]
    rates = jnp.asarray([float(model.optimizer.learning_rate) for model in models])
    keys = jax.random.split(jax.random.key(0), len(models))
    state = (weights, zeros, [jnp.zeros_like(leaf) for leaf in weights], jnp.zeros(len(models)), rates, keys)
    placed = jax.device_put((x, y))
    whole = len(x) // batch * batch

    def step(carried: Any, rows: Any) -> Any:
        weights, means, squares, count, rate = carried
        loss, grads = jax.value_and_grad(_loss)(weights, placed[0][rows], placed[1][rows])
        count = count + 1
        alpha = rate * jnp.sqrt(1 - _BETAS[1] ** count) / (1 - _BETAS[0] ** count)
        means = [m + (g - m) * (1 - _BETAS[0]) for m, g in zip(means, grads, strict=True)]
        squares = [v + (g * g - v) * (1 - _BETAS[1]) for v, g in zip(squares, grads, strict=True)]
        weights = [
            w - m * alpha / (jnp.sqrt(v) + _EPSILON) for w, m, v in zip(weights, means, squares, strict=True)
        ]
        return (weights, means, squares, count, rate), loss

    def epoch(carried: Any, key: Any) -> Any:
        order = jax.random.permutation(key, len(x))
        carried, losses = jax.lax.scan(step, carried, order[:whole].reshape(-1, batch))
        if whole < len(x):
            carried, _ = step(carried, order[whole:])
        return carried, losses.mean()

    def member(weights: Any, means: Any, squares: Any, count: Any, rate: Any, key: Any) -> Any:
        key, *each = jax.random.split(key, epochs + 1)
        carried, losses = jax.lax.scan(epoch, (weights, means, squares, count, rate), jnp.stack(each))
        return (*carried, key), losses

    run = jax.jit(jax.vmap(member), donate_argnums=(0, 1, 2))
    return lambda state: run(*state)[0], state


def _loss(weights: Any, x: Any, y: Any) -> Any:
    hidden = jax.nn.relu(x @ weights[0] + weights[1])
    chances = jax.nn.log_softmax(hidden @ weights[2] + weights[3])
    return -jnp.take_along_axis(chances, y[:, None], axis=1).mean()
