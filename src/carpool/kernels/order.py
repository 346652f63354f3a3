"""The keys of a shuffle, where they are sorted: `carpool.random.order_keys` by whatever is fastest there.

Written with tensors, ten rounds of Philox are some 250 passes over the memory that the keys take; with thousands of members an epoch's
shuffle took more than half as long as its steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from carpool.random import MULTIPLIERS, ORDER_CALL, WEYL, host_order_keys
from carpool.random import order_keys as by_operations

_SOURCE = f"""
template <typename T> T order_key(T position, T seed, T epoch) {{
    unsigned int c0 = (unsigned int)position, c1 = {ORDER_CALL}u;
    unsigned int c2 = (unsigned int)epoch, c3 = (unsigned int)(epoch >> 32);
    unsigned int k0 = (unsigned int)seed, k1 = (unsigned int)(seed >> 32);
    for (int round = 0; round < 10; ++round) {{
        unsigned long long p0 = {MULTIPLIERS[0]}ull * c0, p1 = {MULTIPLIERS[1]}ull * c2;
        c0 = (unsigned int)(p1 >> 32) ^ c1 ^ k0;
        c1 = (unsigned int)p1;
        c2 = (unsigned int)(p0 >> 32) ^ c3 ^ k1;
        c3 = (unsigned int)p0;
        k0 += {WEYL[0]}u;
        k1 += {WEYL[1]}u;
    }}
    return ((T)c0 << 31) | (T)(c1 >> 1);
}}
"""


def order_keys(seeds: Tensor, epochs: Tensor, length: int) -> Tensor:
    """The 63-bit sort key of each position up to `length`, a row for each seed and epoch."""
    if seeds.device.type == "cpu":
        return torch.from_numpy(host_order_keys(seeds.numpy(), epochs.numpy(), length))
    compute = (_kernel() if seeds.device.type == "cuda" else None) or by_operations
    return compute(torch.arange(length, device=seeds.device)[None], seeds[:, None], epochs[:, None])


@functools.cache
def _kernel() -> Callable[..., Tensor] | None:
    """Compiled by the driver's compiler at its first call; None where that cannot be."""
    try:
        made = torch.cuda.jiterator._create_jit_fn(_SOURCE)
        probe = torch.zeros(1, dtype=torch.int64, device="cuda")
        sound = torch.equal(made(probe, probe + 3, probe + 1), by_operations(probe, probe + 3, probe + 1))
    except (AttributeError, RuntimeError):
        return None
    return made if sound else None
