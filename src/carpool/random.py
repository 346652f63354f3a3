"""Counter-based randomness: every number is a function of (seed, what it is for, position).

Covers the generator itself and the order of batches. The keyed torch operators built on it live in
`kernels/random.py`. Nothing here has state, so a job's numbers cannot depend on its neighbours.

Philox4x32-10 (Salmon et al., SC 2011) is written with `*`, `>>`, `&`, `^` and `+` on 64-bit integers only, so one
definition serves NumPy arrays and torch tensors, eager, vmapped or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ORDER_CALL = 0xFFFFFFFF  # no operator call in a step ever gets this number


def _product(word: Any, multiplier: int) -> tuple[Any, Any]:
    """High and low half of a 32 by 32 bit product, in two parts that stay below 2**49.

    The whole product would wrap a signed 64-bit integer, which C++ leaves undefined: compiled for a CPU, a scalar
    operand gave other bits than eager (tests/kernels/test_keyed_random.py).
    """
    low, high = word * (multiplier & 0xFFFF), word * (multiplier >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _MASK


def philox(
    counter: tuple[Any, Any, Any, Any],
    key: tuple[Any, Any],
    word: Callable[[int], Any] = int,
    product: Callable[[Any, int], tuple[Any, Any]] = _product,
) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words (in 64-bit integers) for each counter under a key.

    Where there are no 64-bit integers, `word` makes constants of the type there is, and `product` multiplies in it.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (h0, l0), (h1, l1) = product(c0, MULTIPLIERS[0]), product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + word(WEYL[0])) & word(_MASK), (k1 + word(WEYL[1])) & word(_MASK)
    return c0, c1, c2, c3


def signed_seed(seed: int) -> int:
    """Any Python integer as the signed 64-bit integer that arrays can hold.

    >>> signed_seed(2**64 - 1), signed_seed(7)
    (-1, 7)
    """
    low = int(seed) & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >> 63 else low


def order_keys(positions: Any, seed: Any, epoch: Any) -> Any:
    """The 63-bit sort key of each position; sorting by it is the shuffle. Arrays of 64-bit integers, which broadcast."""
    words = philox(
        (positions & _MASK, ORDER_CALL, epoch & _MASK, (epoch >> 32) & _MASK),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    return (words[0] << 31) | (words[1] >> 1)


_BLOCK = 1 << 14  # keys made at a time: what is between them stays in a core's cache


def host_order_keys(
    seeds: Sequence[int] | np.ndarray, epochs: Sequence[int] | np.ndarray, length: int
) -> np.ndarray:
    """`order_keys` of positions from 0 on, a row for each pair of seed and epoch: several times as fast as by whole arrays."""
    own, when = (np.ascontiguousarray(given, np.int64).view(np.uint64)[:, None] for given in (seeds, epochs))
    own, when = np.broadcast_arrays(own, when)
    keys = np.empty((len(own), length), np.int64)
    columns = min(max(1, length), _BLOCK)
    rows = max(1, _BLOCK // columns)
    for first in range(0, length, columns):
        positions = np.arange(first, min(length, first + columns), dtype=np.uint64)[None]
        for row in range(0, len(own), rows):
            seed, epoch = own[row : row + rows], when[row : row + rows]
            words = philox(
                (positions, np.uint64(ORDER_CALL), epoch & np.uint64(_MASK), epoch >> np.uint64(32)),
                (seed & np.uint64(_MASK), seed >> np.uint64(32)),
                word=np.uint64,
                product=_wide_product,
            )
            keys[row : row + rows, first : first + columns] = (words[0] << np.uint64(31)) | (
                words[1] >> np.uint64(1)
            )
    return keys


def _wide_product(word: np.ndarray, multiplier: int) -> tuple[np.ndarray, np.ndarray]:
    """High and low half of a product of unsigned integers, which has room in 64 bits."""
    product = word * np.uint64(multiplier)
    return product >> np.uint64(32), product & np.uint64(_MASK)


def batch_order(seed: int, epoch: int, length: int) -> np.ndarray:
    """The order in which a job with this seed reads `length` samples in `epoch` (counted from 0).

    Public and stable, so anyone can reproduce a run in a loop of their own.

    >>> batch_order(seed=0, epoch=0, length=8).tolist() == batch_order(0, 0, 8).tolist()
    True
    >>> sorted(batch_order(3, 1, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return batch_orders([seed], [epoch], length)[0]


def batch_orders(seeds: Sequence[int], epochs: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    """`batch_order` of several seeds and epochs at once, a row for each pair of them. One seed goes with every epoch."""
    own = np.asarray([signed_seed(seed) for seed in seeds], np.int64)
    return sorted_places(host_order_keys(own, epochs, length))


def sorted_places(keys: np.ndarray) -> np.ndarray:
    """The stable order of each row of 63-bit keys: numbers are sorted several times as fast as by `argsort`, so each carries its place.

    The places take the keys' last bits. Where two keys of a row differ in those alone, the row is sorted once more, by whole keys.

    >>> sorted_places(np.asarray([[1 << 40, 5, 1 << 50, 4]])).tolist()
    [[3, 1, 0, 2]]
    """
    bits = max(keys.shape[1] - 1, 0).bit_length()
    carried = keys >> bits << bits
    carried |= np.arange(keys.shape[1])
    carried.sort(axis=1)
    places = carried & ((1 << bits) - 1)
    carried >>= bits
    tied = (carried[:, 1:] == carried[:, :-1]).any(axis=1)
    places[tied] = np.argsort(keys[tied], axis=1, kind="stable")
    return places
