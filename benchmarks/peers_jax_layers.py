"""What the JAX peers' networks are made of: pure functions of nests of arrays.

Imports JAX, so it is imported only in the process that `jax_worker` starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Params = Any
Stats = Any


@dataclass(frozen=True)
class Network:
    """A structure as pure functions; `stats` are what a forward pass changes, such as running means."""

    init: Callable[[Array], Params]
    apply: Callable[[Params, Stats, Array], tuple[Array, Stats]]
    stats: Callable[[], Stats] = tuple


def stateless(
    apply: Callable[[Params, Array], Array],
) -> Callable[[Params, Stats, Array], tuple[Array, Stats]]:
    return lambda params, stats, x: (apply(params, x), stats)


def linear(key: Array, inside: int, outside: int) -> Params:
    bound = 1 / math.sqrt(inside)
    return jax.random.uniform(key, (inside, outside), minval=-bound, maxval=bound), jnp.zeros(outside)


def apply_linear(params: Params, x: Array) -> Array:
    weight, bias = params
    return x @ weight + bias


def apply_conv(params: Params, x: Array) -> Array:
    weight, bias = params
    made = (
        lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias
    )
    return lax.reduce_window(
        jax.nn.relu(made), np.array(-np.inf, made.dtype), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )


def normalised(scale_shift: Params, x: Array) -> Array:
    scale, shift = scale_shift
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift
