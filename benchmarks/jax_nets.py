"""The four networks of the JAX benchmark, as pure functions: the shapes of the numbers to beat."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Net:
    """A network, its data and how long an epoch is."""

    init: Callable[[Any], Any]
    apply: Callable[[Any, Any], Any]
    sample: tuple[int, ...]
    batch: int
    steps: int
    classes: int
    tokens: bool = False

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        random, count = np.random.default_rng(0), self.batch * self.steps
        if self.tokens:
            x = random.integers(0, self.classes, (count, *self.sample)).astype(np.int32)
            return x, random.integers(0, self.classes, (count, *self.sample)).astype(np.int32)
        x = random.normal(size=(count, *self.sample)).astype(np.float32)
        return x, random.integers(0, self.classes, count).astype(np.int32)


def loss(prediction: Any, target: Any) -> Any:
    flat = jax.nn.log_softmax(prediction.reshape(-1, prediction.shape[-1]))
    return -jnp.take_along_axis(flat, target.reshape(-1)[:, None], 1).mean()


def _dense(key: Any, inputs: int, outputs: int) -> dict[str, Any]:
    w = jax.random.uniform(key, (inputs, outputs), minval=-1, maxval=1) / math.sqrt(inputs)
    return {"w": w, "b": jnp.zeros(outputs)}


def _layer(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def _mlp(*widths: int) -> Callable[[Any], Any]:
    def init(key: Any) -> Any:
        keys = jax.random.split(key, len(widths) - 1)
        return [_dense(k, a, b) for k, a, b in zip(keys, widths[:-1], widths[1:], strict=True)]

    return init


def _apply_mlp(p: Any, x: Any) -> Any:
    for layer in p[:-1]:
        x = jax.nn.relu(_layer(layer, x))
    return _layer(p[-1], x)


def _init_cnn(key: Any) -> Any:
    keys = jax.random.split(key, 4)
    shapes = ((3, 32), (32, 64), (64, 64))
    made = [
        {"w": jax.random.normal(k, (3, 3, a, b)) * 0.05, "b": jnp.zeros(b)}
        for k, (a, b) in zip(keys, shapes, strict=False)
    ]
    return [*made, _dense(keys[3], 1024, 10)]


def _apply_cnn(p: Any, x: Any) -> Any:
    for layer in p[:-1]:
        spec = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=spec)
        x = jax.nn.relu(x + layer["b"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return _layer(p[-1], x.reshape(x.shape[0], -1))


def _init_transformer(key: Any) -> Any:
    width, keys = 128, jax.random.split(key, 11)
    blocks = [
        {
            "n1": jnp.ones(width),
            "n2": jnp.ones(width),
            "qkv": _dense(keys[3 + 4 * i], width, 3 * width),
            "out": _dense(keys[4 + 4 * i], width, width),
            "up": _dense(keys[5 + 4 * i], width, 4 * width),
            "down": _dense(keys[6 + 4 * i], 4 * width, width),
        }
        for i in range(2)
    ]
    embed = jax.random.normal(keys[0], (128, width)) * 0.02
    place = jax.random.normal(keys[1], (64, width)) * 0.02
    return {"embed": embed, "place": place, "blocks": blocks, "out": _dense(keys[2], width, 128)}


def _normed(scale: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return scale * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _apply_transformer(p: Any, x: Any) -> Any:
    y = p["embed"][x] + p["place"]
    for block in p["blocks"]:
        batch, length, width = y.shape
        heads = _layer(block["qkv"], _normed(block["n1"], y)).reshape(batch, length, 3, 4, width // 4)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * (width // 4) ** -0.5, -1)
        y = y + _layer(block["out"], jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, length, width))
        y = y + _layer(block["down"], jax.nn.gelu(_layer(block["up"], _normed(block["n2"], y))))
    return _layer(p["out"], y)


NETS = {
    "tiny": Net(_mlp(32, 64, 10), _apply_mlp, (32,), batch=32, steps=128, classes=10),
    "mlp": Net(_mlp(784, 256, 256, 10), _apply_mlp, (784,), batch=128, steps=32, classes=10),
    "cnn": Net(_init_cnn, _apply_cnn, (32, 32, 3), batch=128, steps=16, classes=10),
    "tfm": Net(_init_transformer, _apply_transformer, (64,), batch=32, steps=16, classes=128, tokens=True),
}
ROWS = {"tiny": (256, 4096), "mlp": (1024,), "tfm": (128,), "cnn": (64,)}
