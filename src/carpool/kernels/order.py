"""The keys of a shuffle, on the device: `carpool.random.order_keys` as one kernel where there is one, else operation by operation.

Written with tensors, ten rounds of Philox are some 250 passes over the memory that the keys take; with thousands of members an epoch's
shuffle took half as long as its steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from carpool.random import _MULTIPLIERS, _WEYL, ORDER_CALL
from carpool.random import order_keys as _by_operations

_SOURCE = f"""
template <typename T> T order_key(T position, T seed, T epoch) {{
    unsigned int c0 = (unsigned int)position, c1 = {ORDER_CALL}u;
    unsigned int c2 = (unsigned int)epoch, c3 = (unsigned int)(epoch >> 32);
    unsigned int k0 = (unsigned int)seed, k1 = (unsigned int)(seed >> 32);
    for (int round = 0; round < 10; ++round) {{
        unsigned long long p0 = {_MULTIPLIERS[0]}ull * c0, p1 = {_MULTIPLIERS[1]}ull * c2;
        c0 = (unsigned int)(p1 >> 32) ^ c1 ^ k0;
        c1 = (unsigned int)p1;
        c2 = (unsigned int)(p0 >> 32) ^ c3 ^ k1;
        c3 = (unsigned int)p0;
        k0 += {_WEYL[0]}u;
        k1 += {_WEYL[1]}u;
    }}
    return ((T)c0 << 31) | (T)(c1 >> 1);
}}
"""


def order_keys(positions: Tensor, seeds: Tensor, epochs: Tensor) -> Tensor:
    """The 63-bit sort key of each position. Tensors broadcast."""
    if positions.device.type == "cuda" and (kernel := _kernel()) is not None:
        return kernel(positions, seeds, epochs)
    return _by_operations(positions, seeds, epochs)


@functools.cache
def _kernel() -> Callable[..., Tensor] | None:
    """Compiled by the driver's compiler at its first call; None where that cannot be."""
    try:
        made = torch.cuda.jiterator._create_jit_fn(_SOURCE)
        probe = torch.zeros(1, dtype=torch.int64, device="cuda")
        sound = torch.equal(made(probe, probe + 3, probe + 1), _by_operations(probe, probe + 3, probe + 1))
    except (AttributeError, RuntimeError):
        return None
    return made if sound else None
