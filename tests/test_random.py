"""The generator against its published answers, and the order of batches: a fair shuffle that never changes silently."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carpool import batch_order
from carpool.random import order_keys, philox, signed_seed

words = st.integers(0, 2**32 - 1)

# Random123's kat_vectors for philox4x32-10: counter, key, answer.
KNOWN = {
    "zeros": (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    "ones": (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}


def parsed(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper writes it, on Python's own integers."""
    for _ in range(10):
        p0, p1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = (
            (p1 >> 32) ^ counter[1] ^ key[0],
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ counter[3] ^ key[1],
            p0 & 0xFFFFFFFF,
        )
        key = ((key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF)
    return counter


# The generator


HELD = {"python": int, "numpy": lambda word: np.array([word]), "torch": lambda word: torch.tensor([word])}


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("case", KNOWN)
def test_philox_gives_the_published_answers(case: str, kind: str):
    (c0, c1, c2, c3), (k0, k1), answer = (parsed(text) for text in KNOWN[case])
    held = HELD[kind]
    made = philox((held(c0), held(c1), held(c2), held(c3)), (held(k0), held(k1)))
    assert tuple(word if kind == "python" else word.item() for word in made) == answer


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_philox_on_arrays_equals_the_paper(counter: tuple[int, ...], key: tuple[int, ...]):
    c0, c1, c2, c3, k0, k1 = (np.array([word]) for word in (*counter, *key))
    made = philox((c0, c1, c2, c3), (k0, k1))
    assert tuple(word.item() for word in made) == plain_philox(counter, key)


@pytest.mark.parametrize(
    ("seed", "signed"), [(0, 0), (7, 7), (-1, -1), (2**63, -(2**63)), (2**64 - 1, -1), (2**64 + 5, 5)]
)
def test_any_integer_is_a_seed(seed: int, signed: int):
    assert signed_seed(seed) == signed


# The order of batches


def test_a_seed_may_be_numpys():
    assert batch_order(np.int64(3), 0, 20).tolist() == batch_order(3, 0, 20).tolist()  # type: ignore[arg-type]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 300))
def test_an_order_is_a_permutation(seed: int, epoch: int, length: int):
    assert sorted(batch_order(seed, epoch, length).tolist()) == list(range(length))


def test_an_order_differs_by_seed_and_by_epoch():
    orders = {tuple(batch_order(seed, epoch, 20)) for seed in range(30) for epoch in range(30)}
    assert len(orders) == 900


def test_both_halves_of_a_seed_and_an_epoch_count():
    base = tuple(batch_order(1, 1, 20))
    assert tuple(batch_order(1 + 2**32, 1, 20)) != base
    assert tuple(batch_order(1, 1 + 2**32, 20)) != base


def test_seeds_that_are_equal_as_64_bits_give_one_order():
    assert batch_order(-1, 0, 20).tolist() == batch_order(2**64 - 1, 0, 20).tolist()


def test_an_order_is_what_sorting_the_published_generator_gives():
    """From the definition alone: the key of a position is the first 63 bits of philox((i, 2**32 - 1, epoch), seed)."""
    seed, epoch = 2**40 + 5, 2**33 + 1

    def key(position: int) -> int:
        counter = (position, 0xFFFFFFFF, epoch & 0xFFFFFFFF, epoch >> 32)
        first, second, *_ = plain_philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
        return (first << 31) | (second >> 1)

    keys = order_keys(np.arange(50), np.int64(seed), np.int64(epoch))
    assert keys.tolist() == [key(position) for position in range(50)]
    assert batch_order(seed, epoch, 50).tolist() == sorted(range(50), key=key)


def test_sort_keys_broadcast_and_fit_a_signed_integer():
    keys = order_keys(np.arange(1000)[None], np.array([[3], [4]]), np.array([[0], [9]]))
    assert keys.shape == (2, 1000)
    assert keys.min() >= 0
    assert keys[1].tolist() == order_keys(np.arange(1000), np.int64(4), np.int64(9)).tolist()


@pytest.mark.parametrize("place", [0, 9])
@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_every_sample_comes_to_every_place_about_equally_often(vary: str, place: int):
    """Chi-square with 9 degrees of freedom: beyond 40 in one of 100 000 fair shuffles. The seeds are fixed."""
    runs = 2000
    orders = (batch_order(i, 0, 10) if vary == "seed" else batch_order(0, i, 10) for i in range(runs))
    counts = np.bincount([order[place] for order in orders], minlength=10)
    assert ((counts - runs / 10) ** 2 / (runs / 10)).sum() < 40


# If one of these fails, every job ever run with carpool would be shuffled otherwise.
GOLDEN = {
    (0, 0, 10): [1, 6, 2, 9, 7, 5, 4, 8, 3, 0],
    (0, 1, 10): [5, 9, 8, 4, 2, 6, 7, 1, 3, 0],
    (1, 0, 10): [0, 3, 8, 9, 1, 7, 6, 4, 2, 5],
    (7, 3, 16): [7, 8, 10, 2, 12, 3, 5, 13, 15, 9, 1, 14, 6, 4, 0, 11],
    (-1, 0, 8): [3, 7, 5, 1, 6, 2, 0, 4],
    (2**40 + 5, 2**33, 12): [9, 8, 10, 11, 6, 3, 5, 2, 7, 4, 0, 1],
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_the_order_never_changes(case: tuple[int, int, int]):
    assert batch_order(*case).tolist() == GOLDEN[case]


def test_a_long_order_never_changes():
    order = batch_order(seed=123, epoch=4, length=50_000).astype("<i8")
    digest = hashlib.sha256(order.tobytes()).hexdigest()
    assert digest == "14e737b2845cd2725a1d43f1fec0311775438381ebdf34f2f055022f6fe8645b"


def test_an_order_touches_no_global_generator():
    before = np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]
    batch_order(0, 0, 100)
    assert (np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()) == before  # type: ignore[index,union-attr]
