"""ResNet-18 for small images in JAX, with BatchNorm's running statistics beside the parameters.

Imports JAX, so it is imported only in the process that `jax_worker` starts.
"""

from __future__ import annotations

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.peers_jax_layers import Network, Params, Stats, apply_linear, linear
from benchmarks.shapes import CLASSES

Shape = tuple[int, int, int, int]  # of a convolution: inside, outside, size, stride


def resnet(widths: tuple[int, ...], blocks: int) -> Network:
    """A stage for each width, every stage after the first at half the size of the one before."""
    stem, places = (3, widths[0], 3, 1), _places(widths, blocks)

    def init(key: Array) -> Params:
        keys = iter(jax.random.split(key, 2 + 3 * len(places)))
        body = [[_init_convolution(next(keys), *shape) for shape in block] for block in places]
        return _init_convolution(next(keys), *stem), body, linear(next(keys), widths[-1], CLASSES)

    def stats() -> Stats:
        return _init_stats(stem), [[_init_stats(shape) for shape in block] for block in places]

    def apply(params: Params, stats: Stats, x: Array) -> tuple[Array, Stats]:
        first, body, head = params
        x, first_stats = _convolved(first, stats[0], x, 1)
        x, moved = jax.nn.relu(x), []
        for own, seen, block in zip(body, stats[1], places, strict=True):
            x, new = _block(own, seen, x, block)
            moved.append(new)
        return apply_linear(head, x.mean((1, 2))), (first_stats, moved)

    return Network(init, apply, stats)


def _places(widths: tuple[int, ...], blocks: int) -> list[list[Shape]]:
    """The convolutions of every block; a third one is the shortcut's."""
    found: list[list[Shape]] = []
    for number, (inside, outside) in enumerate(pairwise((widths[0], *widths))):
        for place in range(blocks):
            stride, before = (2 if number and not place else 1), outside if place else inside
            block: list[Shape] = [(before, outside, 3, stride), (outside, outside, 3, 1)]
            found.append(
                [*block, (before, outside, 1, stride)] if (stride, before) != (1, outside) else block
            )
    return found


def _block(params: Params, stats: Stats, x: Array, shapes: list[Shape]) -> tuple[Array, Stats]:
    made, first = _convolved(params[0], stats[0], x, shapes[0][3])
    made, second = _convolved(params[1], stats[1], jax.nn.relu(made), 1)
    if len(shapes) == 2:
        return jax.nn.relu(made + x), [first, second]
    short, third = _convolved(params[2], stats[2], x, shapes[2][3])
    return jax.nn.relu(made + short), [first, second, third]


def _init_convolution(key: Array, inside: int, outside: int, size: int, stride: int) -> Params:
    weight = jax.random.normal(key, (size, size, inside, outside)) / math.sqrt(size * size * inside)
    return weight, jnp.ones(outside), jnp.zeros(outside)


def _init_stats(shape: Shape) -> Stats:
    return jnp.zeros(shape[1]), jnp.ones(shape[1])


def _convolved(params: Params, stats: Stats, x: Array, stride: int) -> tuple[Array, Stats]:
    """A convolution and BatchNorm in training, which moves its running statistics by a tenth."""
    weight, scale, shift = params
    size = weight.shape[0] // 2
    pads = ((size, size), (size, size))
    made = lax.conv_general_dilated(
        x, weight, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    wide = made.astype(jnp.float32)
    mean, spread = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
    normal = (wide - mean) * lax.rsqrt(spread + 1e-5)
    count = wide.size // wide.shape[-1]
    moved = (0.9 * stats[0] + 0.1 * mean, 0.9 * stats[1] + 0.1 * spread * count / (count - 1))
    return (normal * scale + shift).astype(x.dtype), lax.stop_gradient(moved)
