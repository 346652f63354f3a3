"""The same models in JAX: vmap over members, lax.scan over the steps of an epoch, data gathered by index on the device.

Imports JAX, so it is imported only in the process that `jax_worker` starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.peers_jax_layers import (
    Network,
    Params,
    Stats,
    apply_conv,
    apply_linear,
    linear,
    normalised,
    stateless,
)
from benchmarks.peers_jax_resnet import resnet
from benchmarks.shapes import (
    CLASSES,
    LENGTH,
    RESNET_BLOCKS,
    RESNET_WIDTHS,
    SMALL_RESNET_BLOCKS,
    SMALL_RESNET_WIDTHS,
    TOKENS,
)

HEADS = 4
WIDTH = 128


@dataclass
class Epochs:
    """Stacked members that train whole epochs; `run` waits for the device."""

    train: Callable[[Params, Array, Array, Array], tuple[Params, Array]]
    state: Params
    order: Array
    x: Array
    y: Array

    def run(self, epochs: int) -> None:
        shown = None
        for _ in range(epochs):
            self.state, shown = self.train(self.state, self.order, self.x, self.y)
        jax.block_until_ready((self.state, shown))


def epochs(
    name: str, x: np.ndarray, y: np.ndarray, learning_rates: np.ndarray, batch_size: int, precision: str
) -> Epochs:
    """The members of a sweep with everything on the device."""
    if precision == "fp32":
        jax.config.update("jax_default_matmul_precision", "highest")
    members, length = len(learning_rates), len(x)
    network = NETWORKS[name]
    keys = jax.random.split(jax.random.key(0), members)
    rows = jax.vmap(lambda key: jax.random.permutation(key, length))(keys)
    order = jnp.moveaxis(rows.reshape(members, -1, batch_size), 1, 0)  # scan walks over steps
    state = jax.jit(jax.vmap(lambda key: _begin(network, key)))(keys)
    step = jax.vmap(partial(_step, network, precision == "bf16"), in_axes=(0, 0, 0, 0))
    lr = jnp.asarray(learning_rates, jnp.float32)

    def train(state: Params, order: Array, x: Array, y: Array) -> tuple[Params, Array]:
        state, shown = lax.scan(lambda state, rows: step(state, x[rows], y[rows], lr), state, order)
        return state, shown.mean(0)

    pixels = np.moveaxis(x, 1, -1) if x.ndim == 4 else x
    return Epochs(
        jax.jit(train, donate_argnums=0), state, order, jnp.asarray(pixels), jnp.asarray(y, jnp.int32)
    )


def _begin(network: Network, key: Array) -> Params:
    params = network.init(key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, network.stats(), zeros, zeros, jnp.float32(0)


def _step(
    network: Network, lowered: bool, state: Params, x: Array, y: Array, lr: Array
) -> tuple[Params, Array]:
    """One member's step with Adam; its loss and accuracy. Lowered, it computes in bfloat16 and keeps float32."""
    params, stats, means, squares, count = state

    def objective(params: Params) -> tuple[Array, tuple[Array, Stats]]:
        seen = (params, x)
        if lowered:
            seen = jax.tree.map(_lowered, seen)
        logits, moved = network.apply(seen[0], stats, seen[1])
        logits = logits.astype(jnp.float32)
        value = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()
        return value, (jnp.stack([value, (logits.argmax(-1) == y).mean()]), moved)

    grads, (shown, stats) = jax.grad(objective, has_aux=True)(params)
    count = count + 1
    means = jax.tree.map(lambda mean, g: 0.9 * mean + 0.1 * g, means, grads)
    squares = jax.tree.map(lambda square, g: 0.999 * square + 0.001 * g * g, squares, grads)
    scale, root = lr / (1 - 0.9**count), 1 - 0.999**count
    params = jax.tree.map(
        lambda p, mean, square: p - scale * mean / (jnp.sqrt(square / root) + 1e-8), params, means, squares
    )
    return (params, stats, means, squares, count), shown


def _lowered(leaf: Array) -> Array:
    return leaf.astype(jnp.bfloat16) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


# Networks


def _mlp(*widths: int) -> Network:
    def init(key: Array) -> Params:
        keys = jax.random.split(key, len(widths) - 1)
        return [linear(k, a, b) for k, a, b in zip(keys, widths, widths[1:], strict=False)]

    def apply(params: Params, x: Array) -> Array:
        for layer in params[:-1]:
            x = jax.nn.relu(apply_linear(layer, x))
        return apply_linear(params[-1], x)

    return Network(init, stateless(apply))


def _cnn(features: int, *channels: int) -> Network:
    def init(key: Array) -> Params:
        *keys, last = jax.random.split(key, len(channels))
        pairs = zip(keys, channels, channels[1:], strict=False)
        convolutions = [
            (jax.random.normal(k, (3, 3, a, b)) / math.sqrt(9 * a), jnp.zeros(b)) for k, a, b in pairs
        ]
        return convolutions, linear(last, features, CLASSES)

    def apply(params: Params, x: Array) -> Array:
        convolutions, head = params
        for convolution in convolutions:
            x = apply_conv(convolution, x)
        return apply_linear(head, x.reshape(len(x), -1))

    return Network(init, stateless(apply))


def _init_transformer(key: Array) -> Params:
    token_key, place_key, out_key, *layer_keys = jax.random.split(key, 5)
    return {
        "tokens": jax.random.normal(token_key, (TOKENS, WIDTH)),
        "places": jax.random.normal(place_key, (LENGTH, WIDTH)) * 0.02,
        "layers": [_init_layer(k) for k in layer_keys],
        "out": linear(out_key, WIDTH, TOKENS),
    }


def _init_layer(key: Array) -> Params:
    mix, out, up, down = jax.random.split(key, 4)
    norm = (jnp.ones(WIDTH), jnp.zeros(WIDTH))
    return {
        "norms": (norm, norm),
        "mix": linear(mix, WIDTH, 3 * WIDTH),
        "out": linear(out, WIDTH, WIDTH),
        "up": linear(up, WIDTH, 4 * WIDTH),
        "down": linear(down, 4 * WIDTH, WIDTH),
    }


def _apply_transformer(params: Params, x: Array) -> Array:
    x = params["tokens"][x] + params["places"]
    for layer in params["layers"]:
        x = x + _attend(layer, normalised(layer["norms"][0], x))
        hidden = jax.nn.gelu(apply_linear(layer["up"], normalised(layer["norms"][1], x)), approximate=False)
        x = x + apply_linear(layer["down"], hidden)
    return apply_linear(params["out"], x)


def _attend(layer: Params, x: Array) -> Array:
    batch, length, width = x.shape
    parts = apply_linear(layer["mix"], x).reshape(batch, length, 3, HEADS, width // HEADS)
    query, key, value = jnp.moveaxis(parts, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // HEADS) ** -0.5
    seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), value)
    return apply_linear(layer["out"], seen.reshape(batch, length, width))


NETWORKS = {
    "tiny": _mlp(32, 64, CLASSES),
    "small-mlp": _mlp(32, 64, CLASSES),
    "mlp": _mlp(784, 256, 256, CLASSES),
    "cnn": _cnn(64 * 4 * 4, 3, 32, 64, 64),
    "small-cnn": _cnn(16 * 4 * 4, 1, 8, 16),
    "tfm": Network(_init_transformer, stateless(_apply_transformer)),
    "resnet": resnet(RESNET_WIDTHS, RESNET_BLOCKS),
    "small-resnet": resnet(SMALL_RESNET_WIDTHS, SMALL_RESNET_BLOCKS),
}
