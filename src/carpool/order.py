"""In which order samples are read: `batch_order`, public and stable, and the same for many members at once on a host.

The keys are random numbers, so a row needs no general sort: twice as many buckets as keys, by their first bits, hold one or none.
That is a page of C, where the machine has a compiler; it is compiled for the first long shuffle and used once it is there, and steps
that are machine code bring it along. (On a GPU: `kernels/order.py`.)
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from carpool.arguments import MOST, Arguments
from carpool.machine import made
from carpool.random import MASK, MULTIPLIERS, ORDER_CALL, WEYL, philox, signed_seed

_BLOCK = 1 << 14  # keys made at a time: what is between them stays in a core's cache
_LONG = 1 << 14  # keys from which on a compiler is asked: NumPy takes a millisecond for so many
_FEW_TIES = 1 << 21  # keys; in longer rows two nearly always differ in nothing but their last bits
_MOST_LENGTH = 1 << 31
SHUFFLE = f"""
#include <stdint.h>
#include <string.h>
#ifndef PLACE
#define PLACE int64_t
#endif

typedef uint64_t quad __attribute__((vector_size(32)));

/* Of the lower halves: one instruction, which GCC does not find by itself. */
static inline quad wide_product(quad a, quad b) {{
#if defined(__AVX2__) && !defined(__clang__)
    typedef int words __attribute__((vector_size(32)));
    return (quad)__builtin_ia32_pmuludq256((words)a, (words)b);
#else
    return a * b;
#endif
}}

static inline quad four_keys(uint64_t at, uint64_t seed, uint64_t epoch) {{
    const quad none = {{0}}, mask = none + {MASK}ull;
    uint64_t k0 = seed & {MASK}ull, k1 = seed >> 32;
    quad c0 = {{at, at + 1, at + 2, at + 3}}, c1 = none + {ORDER_CALL}ull;
    quad c2 = none + (epoch & {MASK}ull), c3 = none + (epoch >> 32);
    for (int round = 0; round < 10; ++round) {{
        const quad p0 = wide_product(c0, none + {MULTIPLIERS[0]}ull);
        const quad p1 = wide_product(c2, none + {MULTIPLIERS[1]}ull);
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1 & mask;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0 & mask;
        k0 = (k0 + {WEYL[0]}ull) & {MASK}ull;
        k1 = (k1 + {WEYL[1]}ull) & {MASK}ull;
    }}
    return c0 << 31 | c1 >> 1;
}}

/* An order, by 2 ** bits buckets; key and end are room for all keys, rounded up to eight, and all buckets. */
static void shuffle(uint64_t seed, uint64_t epoch, int64_t length, int bits, PLACE *out, uint64_t *key,
                    uint32_t *end) {{
    const int64_t buckets = (int64_t)1 << bits;
    const int shift = 63 - bits;
    for (int64_t i = 0; i < length; i += 8) {{  /* two quads at a time: each round waits for the one before */
        const quad low = four_keys((uint64_t)i, seed, epoch), high = four_keys((uint64_t)i + 4, seed, epoch);
        memcpy(key + i, &low, sizeof low);
        memcpy(key + i + 4, &high, sizeof high);
    }}

    for (int64_t b = 0; b < buckets; ++b) end[b] = 0;
    for (int64_t i = 0; i < length; ++i) ++end[key[i] >> shift];
    uint32_t begin = 0;
    for (int64_t b = 0; b < buckets; ++b) {{
        const uint32_t held = end[b];
        end[b] = begin;
        begin += held;
    }}
    for (int64_t i = 0; i < length; ++i) out[end[key[i] >> shift]++] = (PLACE)i;

    /* Nobody is far from its place, and equal keys stand in the order of their positions. */
    for (int64_t at = 1; at < length; ++at) {{
        const PLACE moved = out[at];
        const uint64_t own = key[moved];
        int64_t to = at;
        for (; to > 0 && key[out[to - 1]] > own; --to) out[to] = out[to - 1];
        out[to] = moved;
    }}
}}
"""
"""One row's order in C; `PLACE` is the type of a position."""

_SOURCE = (
    SHUFFLE
    + """
void order(const uint64_t *seeds, const uint64_t *epochs, int64_t rows, int64_t length, int bits,
           int64_t *out, uint64_t *key, uint32_t *end) {
    for (int64_t row = 0; row < rows; ++row)
        shuffle(seeds[row], epochs[row], length, bits, out + row * length, key, end);
}
"""
)


def bucket_bits(length: int) -> int:
    """Twice as many buckets as keys: most hold one or none.

    >>> bucket_bits(1000), 1 << bucket_bits(1000)
    (11, 2048)
    """
    return max(1, length - 1).bit_length() + 1


def scratch_bytes(length: int) -> int:
    """The room that keys and buckets of a row take, keys first."""
    return 8 * (-(-length // 8) * 8) + (4 << bucket_bits(length))


def batch_order(seed: int, epoch: int, length: int) -> np.ndarray:
    """The order in which a job with this seed reads `length` samples in `epoch` (counted from 0).

    Public and stable, so anyone can reproduce a run in a loop of their own.

    >>> batch_order(seed=0, epoch=0, length=8).tolist() == batch_order(0, 0, 8).tolist()
    True
    >>> sorted(batch_order(3, 1, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    says = Arguments()
    seed = says.whole("seed", seed, "pass the job's seed")
    epoch = says.whole("epoch", epoch, "count epochs from 0", 0, MOST)
    length = says.whole("length", length, "pass the number of samples", 0, _MOST_LENGTH)
    return batch_orders([seed], [epoch], length)[0]


def batch_orders(seeds: Sequence[int], epochs: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    """`batch_order` of several seeds and epochs at once, a row for each pair of them. One seed goes with every epoch."""
    own = np.asarray([signed_seed(seed) for seed in seeds], np.int64)
    return host_orders(own, np.asarray(epochs, np.int64), length)


def host_orders(seeds: np.ndarray, epochs: np.ndarray, length: int) -> np.ndarray:
    """`batch_orders` of seeds that are 64-bit integers already, by whatever is fastest here."""
    seeds, epochs = np.broadcast_arrays(seeds, epochs)
    native = _native_for(len(seeds) * length) if length < _MOST_LENGTH else None
    if native is not None:
        return _by_buckets(native, seeds, epochs, length)
    return sorted_places(order_keys(seeds, epochs, length))


def order_keys(seeds: np.ndarray, epochs: np.ndarray, length: int) -> np.ndarray:
    """`carpool.random.order_keys` of positions from 0 on, a row for each pair of seed and epoch, in blocks."""
    own, when = (given.astype(np.int64).view(np.uint64)[:, None] for given in (seeds, epochs))
    keys = np.empty((len(own), length), np.int64)
    columns = min(max(1, length), _BLOCK)
    rows = max(1, _BLOCK // columns)
    for first in range(0, length, columns):
        positions = np.arange(first, min(length, first + columns), dtype=np.uint64)[None]
        for row in range(0, len(own), rows):
            seed, epoch = own[row : row + rows], when[row : row + rows]
            words = philox(
                (positions, np.uint64(ORDER_CALL), epoch & np.uint64(MASK), epoch >> np.uint64(32)),
                (seed & np.uint64(MASK), seed >> np.uint64(32)),
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
    return product >> np.uint64(32), product & np.uint64(MASK)


def sorted_places(keys: np.ndarray) -> np.ndarray:
    """The stable order of each row of 63-bit keys: numbers are sorted several times as fast as by `argsort`, so each carries its place.

    The places take the keys' last bits. Where two keys of a row differ in those alone, the row is sorted once more, by whole keys.

    >>> sorted_places(np.asarray([[1 << 40, 5, 1 << 50, 4]])).tolist()
    [[3, 1, 0, 2]]
    """
    if keys.shape[1] > _FEW_TIES:
        return np.argsort(keys, axis=1, kind="stable")
    bits = max(keys.shape[1] - 1, 0).bit_length()
    carried = keys >> bits << bits
    carried |= np.arange(keys.shape[1])
    carried.sort(axis=1)
    places = carried & ((1 << bits) - 1)
    carried >>= bits
    tied = (carried[:, 1:] == carried[:, :-1]).any(axis=1)
    places[tied] = np.argsort(keys[tied], axis=1, kind="stable")
    return places


def _native_for(count: int) -> ctypes.CDLL | None:
    """The compiled page for so many keys; None until it is there, for which nobody waits, and where few were ever wanted."""
    if count < _LONG and not _asked.cache_info().currsize:
        return None
    try:
        asked = _asked()
    except RuntimeError:  # no thread can be started any more
        return None
    return asked.result() if asked.done() else None


@functools.cache
def _asked() -> Future[ctypes.CDLL | None]:
    asked: Future[ctypes.CDLL | None] = Future()
    threading.Thread(target=lambda: asked.set_result(_native()), name="carpool-order", daemon=True).start()
    return asked


def _native() -> ctypes.CDLL | None:
    """None where it cannot be compiled or loaded, or does not give the public order: NumPy is always there."""
    try:
        native = made(_SOURCE).library
        seeds, epochs = np.asarray([[3, -5], [1, 1 << 40]])
        public = sorted_places(order_keys(seeds, epochs, 100))
        return native if np.array_equal(_by_buckets(native, seeds, epochs, 100), public) else None
    except Exception:
        return None


def _by_buckets(native: ctypes.CDLL, seeds: np.ndarray, epochs: np.ndarray, length: int) -> np.ndarray:
    bits = bucket_bits(length)
    own, when = (np.ascontiguousarray(given, np.int64) for given in (seeds, epochs))
    out = np.empty((len(own), length), np.int64)
    key, end = np.empty(length + 7, np.uint64), np.empty(1 << bits, np.uint32)
    sizes = (ctypes.c_int64(len(own)), ctypes.c_int64(length), ctypes.c_int(bits))
    native.order(*map(_at, (own, when)), *sizes, *map(_at, (out, key, end)))
    return out


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
