"""Counter-based randomness: every number is a function of (seed, what it is for, position).

The generator itself. The order of batches is made with it in `order.py`, the keyed torch operators in `kernels/random.py`. Nothing
here has state, so a job's numbers cannot depend on its neighbours.

Philox4x32-10 (Salmon et al., SC 2011) is written with `*`, `>>`, `&`, `^` and `+` on 64-bit integers only, so one
definition serves NumPy arrays and torch tensors, eager, vmapped or compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ORDER_CALL = 0xFFFFFFFF  # no operator call in a step ever gets this number


def _product(word: Any, multiplier: int) -> tuple[Any, Any]:
    """High and low half of a 32 by 32 bit product, in two parts that stay below 2**49.

    The whole product would wrap a signed 64-bit integer, which C++ leaves undefined: compiled for a CPU, a scalar
    operand gave other bits than eager (tests/kernels/test_keyed_random.py).
    """
    low, high = word * (multiplier & 0xFFFF), word * (multiplier >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & MASK


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
        k0, k1 = (k0 + word(WEYL[0])) & word(MASK), (k1 + word(WEYL[1])) & word(MASK)
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
        (positions & MASK, ORDER_CALL, epoch & MASK, (epoch >> 32) & MASK),
        (seed & MASK, (seed >> 32) & MASK),
    )
    return (words[0] << 31) | (words[1] >> 1)
