"""Who holds the interpreter's lock: the ends of the scale, which no busy machine can mix up."""

import hashlib
import threading

import pytest

from carpool.process.gil import held


def counts():
    """Pure Python."""
    total = 0
    for i in range(200_000):
        total += i
    return total


def hashes():
    """In C, without the lock."""
    return hashlib.sha256(DATA).digest()


DATA = bytes(20_000_000)


def test_python_holds_the_lock_and_c_that_releases_it_does_not():
    """The least of a few: a machine that is busy with something else makes a thread late as the lock does."""
    python = max(held(counts).share for _ in range(3))
    released = min(held(hashes).share for _ in range(3))
    assert python > 0.5
    assert released < python / 2


def test_calls_are_counted_and_timed():
    calls = []
    found = held(lambda: calls.append(1), least_s=0.01)
    assert len(calls) > 1
    assert 0 < found.call_s * len(calls) < 10
    assert 0 <= found.share <= 1


def test_what_the_function_raises_is_raised_and_no_thread_is_left():
    def fails():
        raise KeyError("no")

    before = threading.active_count()
    with pytest.raises(KeyError):
        held(fails)
    assert threading.active_count() == before
