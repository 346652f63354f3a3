"""The ledger never promises more than there is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.memory.ledger import Ledger

properties = settings(max_examples=150)


def test_a_request_within_the_capacity_is_admitted():
    ledger, admitted = Ledger(100).offer("a", 60)
    assert admitted
    assert (ledger.held_bytes, ledger.free_bytes, dict(ledger.held)) == (60, 40, {"a": 60})


def test_all_there_is_can_be_had():
    assert Ledger(100).offer("a", 100)[1]


def test_a_request_beyond_it_changes_nothing():
    before, _ = Ledger(100).offer("a", 60)
    after, admitted = before.offer("b", 41)
    assert not admitted
    assert after == before


def test_an_offer_leaves_the_ledger_it_was_made_to_as_it_was():
    ledger = Ledger(100)
    ledger.offer("a", 60)
    assert ledger.free_bytes == 100


def test_a_holder_asks_once():
    ledger, _ = Ledger(100).offer("a", 60)
    with pytest.raises(ValueError, match="'a' already holds 60 bytes; release it"):
        ledger.offer("a", 1)


def test_only_holders_release():
    ledger, _ = Ledger(100).offer("a", 60)
    with pytest.raises(ValueError, match=r"'b' holds nothing; holders are \['a'\]"):
        ledger.release("b")


@properties
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 600)), max_size=30),
)
def test_no_history_of_offers_and_releases_exceeds_the_capacity(capacity: int, moves: list[tuple[str, int]]):
    """A holder that asks again releases first. What is held is always the sum of what was admitted."""
    ledger, expected = Ledger(capacity), dict[str, int]()
    for holder, size in moves:
        if holder in expected:
            ledger = ledger.release(holder)
            del expected[holder]
        fits = size <= capacity - sum(expected.values())
        ledger, admitted = ledger.offer(holder, size)
        assert admitted == fits
        if admitted:
            expected[holder] = size
        assert dict(ledger.held) == expected
        assert 0 <= ledger.held_bytes <= capacity
        assert ledger.free_bytes == capacity - sum(expected.values())
    for holder in list(expected):
        ledger = ledger.release(holder)
    assert ledger == Ledger(capacity)
