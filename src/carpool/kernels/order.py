"""The order of a shuffle, where it is read: `carpool.order.batch_orders` by whatever is fastest there.

Written with tensors, ten rounds of Philox are some 250 passes over the memory that the keys take, and a sort knows nothing of them. With
thousands of members an epoch's shuffle took more than half as long as its steps. But the keys are random numbers: as many buckets as
keys, by their first bits, hold one or two each. A block puts a row into them in its shared memory, and orders each bucket by itself.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from carpool.kernels.cuda import compiled
from carpool.order import host_orders
from carpool.random import MULTIPLIERS, ORDER_CALL, WEYL
from carpool.random import order_keys as by_operations

_THREADS = 1024
_SUMS_BYTES = 4 * _THREADS
_MOST_PARTS = 1 << 15  # a grid has no more than 65,535 blocks in y
_SOURCE = f"""
__device__ unsigned long long key_of(unsigned int position, long long seed, long long epoch) {{
    unsigned int c0 = position, c1 = {ORDER_CALL}u;
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
    return ((unsigned long long)c0 << 31 | c1 >> 1);
}}

// The keys of rows: blocks in x are rows, those in y take turns at their parts.
extern "C" __global__ void keys(const long long* seeds, const long long* epochs, long long* out, int length) {{
    for (long long i = blockIdx.y * blockDim.x + threadIdx.x; i < length; i += (long long)gridDim.y * blockDim.x)
        out[(long long)blockIdx.x * length + i] = key_of(i, seeds[blockIdx.x], epochs[blockIdx.x]);
}}

// The order of rows: a block is a row, in 2 ** bits buckets.
extern "C" __global__ void order(const long long* seeds, const long long* epochs, long long* out, int length, int bits) {{
    extern __shared__ unsigned long long key[];
    unsigned int* end = (unsigned int*)(key + length);
    unsigned short* place = (unsigned short*)(end + (1 << bits));
    __shared__ unsigned int sums[{_THREADS}];
    const int thread = threadIdx.x, threads = blockDim.x, buckets = 1 << bits;
    const long long seed = seeds[blockIdx.x], epoch = epochs[blockIdx.x];

    for (int b = thread; b < buckets; b += threads) end[b] = 0;
    __syncthreads();
    for (int i = thread; i < length; i += threads) {{
        key[i] = key_of(i, seed, epoch);
        atomicAdd(&end[key[i] >> (63 - bits)], 1u);
    }}
    __syncthreads();

    // Where each bucket begins: a thread adds up a run of them, then all threads' sums are added up.
    const int run = (buckets + threads - 1) / threads, first = min(thread * run, buckets), last = min(first + run, buckets);
    unsigned int sum = 0;
    for (int b = first; b < last; ++b) sum += end[b];
    sums[thread] = sum;
    __syncthreads();
    for (int step = 1; step < threads; step *= 2) {{
        unsigned int before = thread >= step ? sums[thread - step] : 0;
        __syncthreads();
        sums[thread] += before;
        __syncthreads();
    }}
    unsigned int begin = sums[thread] - sum;
    for (int b = first; b < last; ++b) {{
        unsigned int held = end[b];
        end[b] = begin;
        begin += held;
    }}
    __syncthreads();

    for (int i = thread; i < length; i += threads)
        place[atomicAdd(&end[key[i] >> (63 - bits)], 1u)] = (unsigned short)i;
    __syncthreads();

    // They came in any order: the keys decide, and of equal ones the position.
    for (int b = thread; b < buckets; b += threads) {{
        unsigned int from = b ? end[b - 1] : 0, to = end[b];
        for (unsigned int at = from + 1; at < to; ++at) {{
            unsigned short moved = place[at];
            unsigned long long own = key[moved];
            unsigned int to_left = at;
            for (; to_left > from; --to_left) {{
                unsigned short other = place[to_left - 1];
                if (key[other] < own || (key[other] == own && other < moved)) break;
                place[to_left] = other;
            }}
            place[to_left] = moved;
        }}
    }}
    __syncthreads();

    long long* row = out + (long long)blockIdx.x * length;
    for (int i = thread; i < length; i += threads) row[i] = place[i];
}}
"""


def orders(seeds: Tensor, epochs: Tensor, length: int) -> Tensor:
    """In which order `length` samples are read, a row for each pair of seed and epoch."""
    if seeds.device.type == "cpu":
        return torch.from_numpy(host_orders(seeds.numpy(), epochs.numpy(), length))
    kernels = _kernels_for(seeds.device)
    if kernels is not None and kernels.fits(length):
        return kernels.order(seeds, epochs, length)
    return torch.argsort(order_keys(seeds, epochs, length), dim=1, stable=True)


def order_keys(seeds: Tensor, epochs: Tensor, length: int) -> Tensor:
    """On a GPU, the 63-bit sort key of each position up to `length`, a row for each pair of seed and epoch."""
    kernels = _kernels_for(seeds.device)
    if kernels is not None:
        return kernels.keys(seeds, epochs, length)
    return by_operations(torch.arange(length, device=seeds.device)[None], seeds[:, None], epochs[:, None])


class Kernels:
    """The two kernels on one GPU."""

    def __init__(self, device: torch.device, source: str = _SOURCE) -> None:
        """Raises RuntimeError where they cannot be compiled."""
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        self._room = getattr(properties, "shared_memory_per_block_optin", 48 << 10) - _SUMS_BYTES
        with torch.cuda.device(device):
            self._made = compiled(source, ("order", "keys"))
            self._made["order"].set_shared_memory_config(self._room)

    def fits(self, length: int) -> bool:
        """Whether a block can order so long a row."""
        return length > 0 and _row_bytes(length) <= self._room

    def order(self, seeds: Tensor, epochs: Tensor, length: int) -> Tensor:
        bits = length.bit_length() - 1
        return self._launched(
            "order",
            (seeds, epochs, length),
            bits,
            grid=(len(seeds), 1, 1),
            block=(min(max(32, 1 << bits), _THREADS), 1, 1),
            shared_mem=_row_bytes(length),
        )

    def keys(self, seeds: Tensor, epochs: Tensor, length: int) -> Tensor:
        parts = min(-(-length // _THREADS), _MOST_PARTS)
        return self._launched(
            "keys", (seeds, epochs, length), grid=(len(seeds), parts, 1), block=(_THREADS, 1, 1)
        )

    def _launched(self, name: str, given: tuple[Tensor, Tensor, int], *more: int, **shape: Any) -> Tensor:
        seeds, epochs, length = given
        made = torch.empty(len(seeds), length, dtype=torch.int64, device=self._device)
        if made.numel():
            with torch.cuda.device(self._device):
                self._made[name](args=[seeds.contiguous(), epochs.contiguous(), made, length, *more], **shape)
        return made


def _row_bytes(length: int) -> int:
    """Of shared memory: keys, the ends of the buckets, places."""
    return 8 * length + 4 * (1 << (length.bit_length() - 1)) + 2 * length


def _kernels_for(device: torch.device) -> Kernels | None:
    """None also while they are compiled, which takes most of a second: a shuffle does not wait for that."""
    if device.type != "cuda":
        return None
    try:
        asked = _asked(device)
    except RuntimeError:  # no thread can be started any more
        return None
    if not asked.done():
        return None
    if asked.exception() is not None:
        _asked.cache_clear()  # another time there may be room
        return None
    return asked.result()


@functools.cache
def _asked(device: torch.device) -> Future[Kernels | None]:
    thread = ThreadPoolExecutor(1, "carpool-order")
    asked = thread.submit(_kernels, device)
    thread.shutdown(wait=False)
    return asked


def _kernels(device: torch.device) -> Kernels | None:
    """None where they cannot be compiled, or do not give the public order."""
    try:
        made = Kernels(device)
        seeds, epochs = torch.tensor([[3, -5], [1, 1 << 40]], device=device)
        found = made.order(seeds, epochs, 100)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError):
        return None
    keys = by_operations(torch.arange(100, device=device)[None], seeds[:, None], epochs[:, None])
    return made if torch.equal(found, torch.argsort(keys, dim=1, stable=True)) else None
