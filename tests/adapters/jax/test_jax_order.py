"""The device's order of samples is `carpool.batch_order`; what a step costs is counted from its trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import carpool
from carpool.adapters.jax.cost import most_steps, operations
from carpool.adapters.jax.lift import traced
from carpool.adapters.jax.order import shuffled, shuffled_on_host, words


@pytest.mark.parametrize("lengths", [(100, 100, 100, 100), (100, 37, 64, 1)])
def test_the_order_is_the_published_one(lengths):
    seeds, epochs = (0, 3, -5, 2**40 + 7), (0, 1, 5, 900)
    places = np.arange(100, dtype=np.int32)[None].repeat(4, 0) + 7
    given = (np.asarray(lengths, np.uint32), np.asarray([words(seed) for seed in seeds], np.uint32))
    order = np.asarray(shuffled(places, *given, np.asarray(epochs, np.uint32)))
    on_host = shuffled_on_host(places, given[0], seeds, np.asarray(epochs))
    for row, (seed, epoch, length) in enumerate(zip(seeds, epochs, lengths, strict=True)):
        expected = carpool.batch_order(seed, epoch, length) + 7
        np.testing.assert_array_equal(order[row, :length], expected)
        np.testing.assert_array_equal(on_host[row, :length], expected)


def test_operations_are_those_of_products_convolutions_and_loops():
    x, w = jnp.ones((8, 4)), jnp.ones((4, 3))
    assert operations(traced(lambda x, w: x @ w, x, w).closed) == 2 * 8 * 4 * 3
    image, kernel = jnp.ones((2, 6, 6, 3)), jnp.ones((3, 3, 3, 5))

    def convolved(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert operations(traced(convolved, image, kernel).closed) == 2 * (2 * 4 * 4 * 5) * 3 * 3 * 3

    def looped(x, w):
        return jax.lax.scan(lambda h, _: (h @ w.T @ x.T @ x, None), x @ w, None, length=7)[0].sum()

    assert operations(traced(lambda x, w: looped(x, jnp.ones((4, 4))), x, w).closed) > 7 * 2 * 8 * 4 * 4


def test_launches_of_long_steps_are_short():
    big = traced(lambda x: x @ x, jax.ShapeDtypeStruct((4096, 4096), jnp.float32)).closed
    assert most_steps(big, 1, "cpu", 256) == 1
    assert 1 < most_steps(big, 64, "gpu", 256) < 256
    assert most_steps(traced(lambda x: x @ x, jnp.ones((4, 4))).closed, 512, "cpu", 256) == 256
