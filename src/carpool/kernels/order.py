"""The order of a shuffle, where it is read: `carpool.random.batch_orders` by whatever is fastest there.

Written with tensors, ten rounds of Philox are some 250 passes over the memory that the keys take, and a sort knows nothing of them. With
thousands of members an epoch's shuffle took more than half as long as its steps. But the keys are random numbers: as many buckets as
keys, by their first bits, hold one or two each. A block puts a row into them in its shared memory, and orders each bucket by itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from carpool.kernels.cuda import compiled
from carpool.random import MULTIPLIERS, ORDER_CALL, WEYL, host_order_keys
from carpool.random import order_keys as by_operations

_THREADS = 1024
_SUMS_BYTES = 4 * _THREADS
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

// The keys of rows: blocks in x are rows, those in y their parts.
extern "C" __global__ void keys(const long long* seeds, const long long* epochs, long long* out, int length) {{
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < length) out[(long long)blockIdx.x * length + i] = key_of(i, seeds[blockIdx.x], epochs[blockIdx.x]);
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
    if seeds.device.type == "cuda" and (kernels := _kernels()) is not None and _fits(length):
        return _in_buckets(kernels["order"], seeds, epochs, length)
    return torch.argsort(order_keys(seeds, epochs, length), dim=1, stable=True)


def order_keys(seeds: Tensor, epochs: Tensor, length: int) -> Tensor:
    """The 63-bit sort key of each position up to `length`, a row for each pair of seed and epoch."""
    if seeds.device.type == "cpu":
        return torch.from_numpy(host_order_keys(seeds.numpy(), epochs.numpy(), length))
    if seeds.device.type == "cuda" and (kernels := _kernels()) is not None:
        return _drawn(kernels["keys"], seeds, epochs, length)
    return by_operations(torch.arange(length, device=seeds.device)[None], seeds[:, None], epochs[:, None])


def _in_buckets(kernel: Any, seeds: Tensor, epochs: Tensor, length: int) -> Tensor:
    made = torch.empty(len(seeds), length, dtype=torch.int64, device=seeds.device)
    bits = length.bit_length() - 1
    kernel(
        grid=(len(seeds), 1, 1),
        block=(min(max(32, 1 << bits), _THREADS), 1, 1),
        args=[seeds.contiguous(), epochs.contiguous(), made, length, bits],
        shared_mem=_row_bytes(length),
    )
    return made


def _drawn(kernel: Any, seeds: Tensor, epochs: Tensor, length: int) -> Tensor:
    made = torch.empty(len(seeds), length, dtype=torch.int64, device=seeds.device)
    kernel(
        grid=(len(seeds), -(-length // _THREADS), 1),
        block=(_THREADS, 1, 1),
        args=[seeds.contiguous(), epochs.contiguous(), made, length],
    )
    return made


def _fits(length: int) -> bool:
    return length > 0 and _row_bytes(length) <= _room()


def _row_bytes(length: int) -> int:
    """Of shared memory: keys, the ends of the buckets, places."""
    return 8 * length + 4 * (1 << (length.bit_length() - 1)) + 2 * length


def _room() -> int:
    """Bytes of shared memory that a block's row can have."""
    return (
        getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 48 << 10) - _SUMS_BYTES
    )


@functools.cache
def _kernels() -> dict[str, Any] | None:
    """None where they cannot be compiled, or do not give the public order."""
    made = compiled(_SOURCE, ("order", "keys"))
    if made is None:
        return None
    try:
        made["order"].set_shared_memory_config(_room())
        seeds, epochs = torch.tensor([[3, -5], [1, 1 << 40]], device="cuda")
        wanted = torch.argsort(
            by_operations(torch.arange(100, device="cuda")[None], seeds[:, None], epochs[:, None])
        )
        sound = torch.equal(_in_buckets(made["order"], seeds, epochs, 100), wanted)
    except (AttributeError, RuntimeError):
        return None
    return made if sound else None
