"""The order in which rows read their samples, made on the device: `carpool.batch_order`, for all rows of a stack at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.order import batch_orders
from carpool.random import ORDER_CALL, philox

_MOST = 0xFFFFFFFF
_BLOCK = 1 << 16  # samples that are shuffled at once on the host: what is made on the way stays in the cache


def _product(word: Any, multiplier: int) -> tuple[Any, Any]:
    """High and low half of a 32 by 32 bit product, of 32-bit words alone: JAX has no longer ones unless it is told to."""
    high, low = np.uint32(multiplier >> 16), np.uint32(multiplier & 0xFFFF)
    a, b = word >> 16, word & 0xFFFF
    middle = a * low + ((b * low) >> 16)
    other = b * high + (middle & 0xFFFF)
    return a * high + (middle >> 16) + (other >> 16), word * np.uint32(multiplier)


def shuffled(places: Any, lengths: np.ndarray, seeds: np.ndarray, epochs: np.ndarray) -> Any:
    """The places [rows, samples] that each row reads in its epoch, in order; beyond a row's own length, anything.

    `seeds` are [rows, 2], low and high word.
    """
    return _shuffled(bool((lengths == places.shape[1]).all()), places, lengths, seeds, epochs)


@partial(jax.jit, static_argnums=0)
def _shuffled(are_full: bool, places: Any, lengths: Any, seeds: Any, epochs: Any) -> Any:
    positions = jnp.broadcast_to(jnp.arange(places.shape[1], dtype=jnp.uint32), places.shape)
    zero = positions * np.uint32(0)
    counter = (positions, zero + np.uint32(ORDER_CALL), zero + epochs[:, None], zero)
    key = (zero + seeds[:, :1], zero + seeds[:, 1:])
    high, low, *_ = philox(counter, key, np.uint32, _product)
    low = low >> 1
    if not are_full:  # last, whatever their keys: equal ones stay in the order of their positions
        beyond = positions >= lengths[:, None]
        high, low = jnp.where(beyond, np.uint32(_MOST), high), jnp.where(beyond, np.uint32(_MOST >> 1), low)
    # By the lower half, then by the upper one: a GPU has a fast sort for one key, and none for two.
    _, order = jax.lax.sort((low, positions), num_keys=1)
    _, order = jax.lax.sort((jnp.take_along_axis(high, order, 1), order), num_keys=1)
    return jnp.take_along_axis(places, order, 1)


def shuffled_on_host(
    places: np.ndarray, lengths: np.ndarray, seeds: Sequence[int], epochs: np.ndarray
) -> np.ndarray:
    """The same by NumPy, a block of rows at a time: XLA sorts slowly on a CPU."""
    order = places.copy()
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        for part in np.array_split(rows, max(1, len(rows) * length // _BLOCK)):
            found = batch_orders([seeds[row] for row in part], epochs[part], length)
            order[part, :length] = np.take_along_axis(places[part, :length], found, 1)
    return order


def words(seed: int) -> tuple[int, int]:
    """A seed's low and high word, as `carpool.batch_order` takes it."""
    low = int(seed) & 0xFFFFFFFFFFFFFFFF
    return low & 0xFFFFFFFF, low >> 32
