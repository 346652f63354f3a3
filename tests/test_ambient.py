"""The process's generators: whoever draws from them has them to itself, and nobody else notices."""

import random
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from carpool import ambient
from carpool.ambient import Ambient, Reading, aside, kept, seeded
from carpool.data import Queue, Reader
from patience import PATIENCE_S


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn_after(seed: int, count: int = 1) -> list[tuple[float, float, float]]:
    """What a program of its own would draw."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return [draw() for _ in range(count)]


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as threads:
        return [ended.result(PATIENCE_S) for ended in [threads.submit(work) for work in works]]


def waits(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begins the work in a thread, and is back once it is in the queue of those who want to go inside."""
    before, ended = len(ambient._turns._asked), ThreadPoolExecutor(1)
    begun = ended.submit(work)
    ended.shutdown(wait=False)
    while len(ambient._turns._asked) == before:
        assert not begun.done(), "it did not wait"
    return lambda: begun.result(PATIENCE_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ambient, "_PATIENCE_S", 0.0)


# One thread


def test_inside_a_seed_the_numbers_are_those_of_a_program_of_its_own_and_outside_nothing_has_moved():
    first, second = drawn_after(7, 2)
    wanted = drawn_after(3, 2)
    drawn_after(7)
    with seeded(3):
        assert [draw(), draw()] == wanted
    assert draw() == second != first


def test_a_seed_for_one_module_leaves_the_others_generators_alone():
    with seeded(3, ("torch",)):
        random.seed(11)
        assert float(torch.rand(())) == drawn_after(3)[0][2]
    random.seed(5)
    wanted = random.random()
    random.seed(5)
    with seeded(3, ("torch",)):
        assert random.random() == wanted


def test_negative_and_huge_seeds_are_seeds_too():
    for seed in (-1, 2**40, 2**64 + 5, -(2**70)):
        with seeded(seed):
            first = draw()
        with seeded(seed):
            assert draw() == first


def test_an_exception_inside_puts_the_generators_back_and_lets_the_next_one_in():
    wanted = drawn_after(7)
    drawn_after(7, 0)
    for error in (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit):
        with suppress(error), seeded(3):
            draw()
            raise error
        with suppress(error), Ambient(3).inside():
            draw()
            raise error
    assert [draw()] == wanted
    assert in_threads(lambda: ambient._turns.mine) == [None]


def test_seeds_may_be_nested_and_each_goes_on_where_it_was():
    outer, inner = drawn_after(1, 3), drawn_after(2, 2)
    with seeded(1):
        assert draw() == outer[0]
        with seeded(2):
            assert [draw(), draw()] == inner
        assert draw() == outer[1]
        with suppress(ValueError), seeded(2):
            draw()
            raise ValueError
        assert draw() == outer[2]


def test_who_waits_and_goes_on_draws_on():
    wanted = drawn_after(4, 4)
    own = Ambient(4)
    found = []
    for _ in range(4):
        with own.inside():
            found.append(draw())
        draw()
    assert found == wanted


def test_a_part_for_the_process_draws_from_the_processs_own_generators_and_leaves_them_as_they_were():
    own, job = drawn_after(7)[0], drawn_after(3, 2)
    drawn_after(7, 0)
    with seeded(3):
        assert draw() == job[0]
        with kept():
            assert draw() == own
        assert draw() == job[1]
    with kept():
        assert draw() == own
    assert draw() == own


# Several threads


def test_two_threads_that_draw_at_once_draw_what_each_draws_alone():
    def work(seed: int) -> list[Any]:
        own, found = Ambient(seed), []
        for _ in range(50):
            with own.inside():
                found.append(draw())
            with seeded(seed):
                found.append(draw())
        return found

    alone = [work(1), work(2)]
    drawn_after(7, 0)
    assert in_threads(lambda: work(1), lambda: work(2)) == alone
    now = draw()
    assert [now] == drawn_after(7)


def test_a_thread_that_works_for_the_one_inside_is_inside_too():
    def nested() -> float:
        with seeded(5):
            return random.random()

    go, ident = threading.Event(), []
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: ident.append(threading.get_ident())).result(PATIENCE_S)
        with Ambient(1).inside(ident[0]):
            assert threads.submit(nested).result(PATIENCE_S) == drawn_after(5)[0][0]
        with seeded(1):
            waiting = threads.submit(nested)
            assert not go.wait(0.01)
            assert not waiting.done(), "it is lent for that turn only"
        assert waiting.result(PATIENCE_S)


def test_aside_lets_others_in_and_whoever_stepped_aside_goes_on_where_it_was():
    outer, inner = drawn_after(1, 4), drawn_after(2, 2)
    drawn_after(7, 0)

    def other() -> Any:
        with seeded(3):
            return draw()

    with seeded(1):
        assert draw() == outer[0]
        with aside():
            assert in_threads(other) == drawn_in_thread(3)
            own = random.getstate()
        assert draw() == outer[1]
        with seeded(2):
            assert draw() == inner[0]
            with aside():
                assert in_threads(other) == drawn_in_thread(3)
                assert random.getstate() == own
            assert draw() == inner[1]
        assert draw() == outer[2]
    assert random.getstate() == own


def drawn_in_thread(seed: int) -> list[Any]:
    """As a program of its own, without moving the generators here."""
    with kept():
        return drawn_after(seed)


def test_what_the_process_draws_while_somebody_steps_aside_counts():
    wanted = drawn_after(7, 2)
    drawn_after(7, 0)
    with seeded(1), seeded(2):
        with aside():
            assert draw() == wanted[0]
        draw()
    assert draw() == wanted[1]


def test_aside_outside_does_nothing():
    before = random.getstate()
    with aside():
        pass
    assert random.getstate() == before


def test_an_interruption_while_waiting_leaves_nobody_waiting_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Who is next and gives up hands on: those behind it look again."""
    turns = ambient._turns
    real = turns._changed.wait

    def interrupted(timeout: float | None = None) -> bool:
        woken = real(timeout)
        if threading.current_thread().name == "interrupted":
            raise KeyboardInterrupt
        return woken

    monkeypatch.setattr(turns._changed, "wait", interrupted)

    def given_up() -> None:
        threading.current_thread().name = "interrupted"
        with suppress(KeyboardInterrupt), seeded(2):
            raise AssertionError("it was interrupted before")

    def goes_on() -> str:
        with seeded(3):
            return "inside"

    with seeded(1):
        first, second = waits(given_up), waits(goes_on)
    first()
    assert second() == "inside"


# Sources


def batches(reading: Reading, work: Callable[[], Any], count: int = 1) -> list[Any]:
    found = []
    for number in range(count):
        with reading.batch(begins=number == 0):
            found.append(work())
    return found


def test_a_source_that_draws_has_generators_of_its_own_from_the_processs_on():
    wanted = drawn_after(7, 8)
    drawn_after(7, 0)
    reading = Reading()
    found = []
    for _ in range(8):
        with reading.batch():
            found.append(draw())
        draw()
    assert found == wanted


def test_a_source_opened_inside_a_turn_starts_from_the_processs_generators_too():
    wanted = drawn_after(7)
    drawn_after(7, 0)
    with seeded(3):
        reading = Reading()
    assert batches(reading, draw) == wanted


def test_a_source_that_draws_waits_for_its_turn_in_every_batch():
    reading = Reading()
    batches(reading, draw)
    batches(reading, lambda: None, 20)
    with seeded(3):
        first = drawn_in_thread(3)[0]
        later = waits(lambda: batches_on(reading))
        assert draw() == first
    assert later() == [None]


def batches_on(reading: Reading) -> list[Any]:
    """A batch in the middle of a pass."""
    with reading.batch():
        return [None]


def test_a_source_that_draws_nothing_waits_for_nobody():
    reading = Reading()
    batches(reading, lambda: None, ambient._CLEAN)
    with seeded(3):
        assert in_threads(lambda: batches_on(reading)) == [[None]]


def test_a_source_that_begins_to_draw_late_is_found():
    reading = Reading()
    batches(reading, lambda: None, 10)
    with reading.batch():
        draw()
    with seeded(3):
        later = waits(lambda: batches_on(reading))
    later()


def test_a_clean_source_is_not_taken_for_one_that_draws_because_another_draws_meanwhile():
    reading = Reading()
    batches(reading, lambda: None, ambient._CLEAN)
    inside, over = threading.Event(), threading.Event()

    def other() -> None:
        with seeded(3):
            inside.set()
            assert over.wait(PATIENCE_S)
            draw()

    def reads() -> None:
        assert inside.wait(PATIENCE_S)
        with reading.batch():
            over.set()
            ended.result(PATIENCE_S)

    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(other)
        reads()
    with seeded(3):
        assert in_threads(lambda: batches_on(reading)) == [[None]]


class Slow:
    """A source that is in the middle of a batch until it is let go."""

    def __init__(self, draws: bool) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.reading, self.found = Reading(), []
        self._draws = draws

    def read(self) -> None:
        with self.reading.batch(begins=True):
            if self._draws:
                self.found.append(draw())
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
        with self.reading.batch():
            if self._draws:
                self.found.append(draw())


def drawn_inside(seed: int) -> list[Any]:
    with seeded(seed):
        return [draw()]


def test_others_do_not_wait_for_ever_for_a_source_that_is_slow_in_a_batch(impatient: None):
    """Whoever is next goes on without it and says so; the source goes on later, with numbers that it has not had."""
    wanted = drawn_after(7, 2)
    drawn_after(7, 0)
    slow = Slow(draws=True)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(slow.read)
        assert slow.begun.wait(PATIENCE_S)
        with pytest.warns(UserWarning, match="draws from the process's random generators"):
            assert drawn_inside(3) == drawn_in_thread(3)
        slow.go_on.set()
        reading.result(PATIENCE_S)
    assert slow.found == wanted
    assert draw() == wanted[0]


def test_a_slow_source_that_draws_nothing_is_left_behind_without_a_word(impatient: None):
    slow = Slow(draws=False)
    with ThreadPoolExecutor(1) as threads, warnings.catch_warnings():
        warnings.simplefilter("error")
        reading = threads.submit(slow.read)
        assert slow.begun.wait(PATIENCE_S)
        with seeded(3):
            assert draw() == drawn_in_thread(3)[0]
        slow.go_on.set()
        reading.result(PATIENCE_S)


def test_who_is_not_next_while_a_slow_source_is_waited_for_becomes_impatient_once_it_is(impatient: None):
    """Those behind another in the queue look again when it is through: the owner may by then be a source."""
    slow = Slow(draws=False)

    def inside() -> str:
        with seeded(2):
            return "inside"

    with ThreadPoolExecutor(1) as threads:
        with seeded(1):
            reading = threads.submit(slow.read)
            while not ambient._turns._asked:
                assert not reading.done()
            behind = waits(inside)
        assert slow.begun.wait(PATIENCE_S)
        assert behind() == "inside"
        slow.go_on.set()
        reading.result(PATIENCE_S)


def test_a_source_that_raises_in_a_batch_puts_the_generators_back():
    before = random.getstate()
    reading = Reading()
    with suppress(ValueError), reading.batch(begins=True):
        draw()
        raise ValueError
    assert random.getstate() == before
    assert in_threads(lambda: ambient._turns.mine) == [None]


def test_the_owner_may_wait_for_sources_that_draw_and_goes_on_where_it_was():
    """A factory that reads a queue: its workers need turns of their own while it waits."""
    wanted = drawn_after(3, 4)
    drawn_after(7, 0)

    def source(worker: int) -> Any:
        for _ in range(3):
            yield draw()

    with seeded(3):
        assert draw() == wanted[0]
        alone = list(Queue(source, workers=2))
        assert draw() == wanted[1]
        assert list(Queue(source, workers=2)) == alone
        assert draw() == wanted[2]
    assert alone[0] == drawn_after(7)[0]


def test_stopping_a_source_that_waits_for_its_turn_does_not_wait_for_it(recwarn: pytest.WarningsRecorder):
    reader = Reader(lambda epoch: iter([1.0, 2.0, 3.0]), capacity=1)
    with seeded(1):
        reader.tap(epochs=1)
        while not ambient._turns._asked:
            pass
        reader.stop()
    assert not recwarn.list


def test_two_readers_of_a_drawing_source_beside_drawing_jobs_read_the_same_every_time():
    def read() -> list[Any]:
        tap = Reader(lambda epoch: (draw() for _ in range(10)), capacity=2).tap(epochs=2)
        found = []
        for _ in range(20):
            with seeded(len(found)):
                draw()
                found.append(tap.wait().batch)
                tap.take(1)
        tap.close()
        return found

    drawn_after(7, 0)
    assert read() == in_threads(read)[0]
    assert [draw()] == drawn_after(7)


def test_two_sources_that_wait_for_each_other_lose_patience(impatient: None) -> None:
    """One is in the middle of a batch, and goes on only when the other has begun one."""
    slow, met = Slow(draws=False), threading.Event()

    def other() -> None:
        with Reading().batch(begins=True):
            met.set()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(slow.read)
        assert slow.begun.wait(PATIENCE_S)
        second = threads.submit(other)
        assert met.wait(PATIENCE_S)
        slow.go_on.set()
        first.result(PATIENCE_S)
        second.result(PATIENCE_S)
