"""Reading ahead: bounded, in one order whatever the timing, errors in their place, nothing left running."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from carpool.data import Queue, Reader
from carpool.errors import DataError
from patience import PATIENCE_S


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "carpool reader"]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert readers() == []


def drained(reader: Reader, epochs: int) -> list[tuple[object, bool]]:
    tap = reader.tap(epochs)
    found = []
    try:
        while sum(last for _, last in found) < epochs:
            item = tap.wait()
            tap.take(1)
            found.append((item.batch, item.last))
    finally:
        tap.close()
    return found


def test_passes_follow_one_another_and_say_where_they_end():
    reader = Reader(lambda epoch: [f"{epoch}a", f"{epoch}b"], capacity=2)
    assert drained(reader, 2) == [("0a", False), ("0b", True), ("1a", False), ("1b", True)]


def test_no_more_is_read_than_fits_and_one_held_back():
    read: list[int] = []
    full = threading.Event()

    def batches(epoch: int) -> Iterator[int]:
        for number in range(100):
            read.append(number)
            if number == 3:  # 2 in the queue, 1 held back, 1 just read
                full.set()
            yield number

    reader = Reader(batches, capacity=2)
    tap = reader.tap(1)
    assert full.wait(PATIENCE_S)
    assert [item.batch for item in tap.ready()] == [0, 1]
    assert len(read) == 4
    reader.stop()


def test_two_taps_see_the_same_batches_read_once():
    read: list[int] = []

    def batches(epoch: int) -> Iterator[int]:
        for number in range(3):
            read.append(number)
            yield number

    reader = Reader(batches, capacity=2)
    one, other = reader.tap(1), reader.tap(1)
    seen: list[list[int]] = [[], []]
    for _ in range(3):
        for place, tap in enumerate((one, other)):
            seen[place].append(tap.wait().batch)
            tap.take(1)
    assert seen == [[0, 1, 2], [0, 1, 2]]
    assert read == [0, 1, 2]
    one.close()
    other.close()


def test_a_tap_that_leaves_holds_nobody_back():
    reader = Reader(lambda epoch: range(10), capacity=2)
    stays, leaves = reader.tap(1), reader.tap(1)
    stays.wait()
    leaves.close()
    for number in range(10):
        assert stays.wait().batch == number
        stays.take(1)
    stays.close()


def test_a_late_tap_needs_a_reader_of_its_own():
    reader = Reader(lambda epoch: range(3), capacity=2)
    tap = reader.tap(1)
    tap.wait()
    assert reader.fresh
    tap.take(1)
    assert not reader.fresh
    with pytest.raises(ValueError, match="open another reader"):
        reader.tap(1)
    tap.close()


def test_an_error_comes_after_the_batches_before_it():
    def batches(epoch: int) -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("disk gone")

    reader = Reader(batches, capacity=8)
    tap = reader.tap(1)
    assert tap.wait().batch == 1
    tap.take(1)
    assert tap.wait().batch == 2
    tap.take(1)
    with pytest.raises(OSError, match="disk gone"):
        tap.wait()
    tap.close()


def test_a_source_that_cannot_be_read_again_says_so():
    once = iter([1, 2])
    reader = Reader(lambda epoch: once, capacity=2)
    with pytest.raises(DataError, match="none in epoch 1"):
        drained(reader, 2)
    reader.stop()


def test_sources_are_closed_when_the_job_ends_early():
    closed: list[int] = []

    def batches(epoch: int) -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(epoch)

    tap = Reader(batches, capacity=2).tap(1)
    tap.wait()
    tap.take(1)
    tap.close()
    assert closed == [0]


def test_a_tap_that_leaves_with_nothing_taken_leaves_everything_for_the_next():
    once = iter(range(4))
    reader = Reader(lambda epoch: once, capacity=2)
    first = reader.tap(1)
    first.wait()
    first.close()
    assert [batch for batch, _ in drained(reader, 1)] == [0, 1, 2, 3]


# The queue


def test_batches_come_from_the_workers_in_turn_however_long_each_takes():
    gates = [threading.Event(), threading.Event()]
    gates[1].set()

    def batches(worker: int) -> Iterator[str]:
        for number in range(3 - worker):
            gates[worker].wait(0.05)  # a slow one, which does not wait for the other for ever
            gates[1 - worker].set()
            yield f"{worker}.{number}"

    queue = Queue(batches, capacity=4, workers=2)
    assert list(queue) == ["0.0", "1.0", "0.1", "1.1", "0.2"]


def test_a_worker_without_batches_is_no_error():
    assert list(Queue(lambda worker: [] if worker else ["a"], workers=2)) == ["a"]


def test_what_a_worker_raises_is_raised():
    def batches(worker: int) -> Iterator[int]:
        yield worker
        if worker == 1:
            raise OSError("disk gone")
        yield worker

    with pytest.raises(OSError, match="disk gone"):
        list(Queue(batches, workers=2))


def test_a_queue_that_is_left_early_stops_its_workers():
    for batch in Queue(lambda worker: iter(range(100)), capacity=2, workers=3):
        assert batch == 0
        break


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"workers": 0}, {"workers": 1.5}])
def test_bad_numbers_are_refused(wrong: dict[str, int]):
    (word,) = wrong
    with pytest.raises(DataError, match=f"Expected {word} of at least 1"):
        Queue(lambda worker: [], **wrong)


def test_a_queue_wants_a_function():
    with pytest.raises(DataError, match="a function of a worker's number"):
        Queue([1, 2])  # type: ignore[arg-type]
