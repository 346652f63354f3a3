"""The arithmetic of rows and launches: each row runs each of its batches once, in order, one shape a launch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.planning.cursor import Chunk, Course, Cursor, Launches, Supply, cut, launches, supplies

properties = settings(max_examples=150)
courses = st.builds(
    Course, length=st.integers(1, 40), batch_size=st.integers(1, 12), epochs=st.integers(1, 4)
)
groups = st.lists(courses, min_size=1, max_size=6)


def cut_from(held: dict[int, Course], cursors: dict[int, Cursor], max_steps: int) -> Chunk | None:
    return cut(supplies(held, cursors), cursors, max_steps)


def simulated(rows: list[Course], max_steps: int) -> list[Chunk]:
    """Every chunk of a group that runs to its end."""
    held = dict(enumerate(rows))
    cursors = dict.fromkeys(held, Cursor())
    made = []
    while chunk := cut(supplies(held, cursors), cursors, max_steps):
        made.append(chunk)
        assert len(made) <= sum(course.steps for course in rows), "a chunk that advances nobody"
        for row in chunk.rows:
            cursors[row] = cursors[row].advanced(chunk.steps, row in chunk.ends)
    return made


# A course


def test_an_epoch_has_full_batches_and_a_short_last_one():
    course = Course(length=10, batch_size=4, epochs=3)
    assert (course.batches, course.steps) == (3, 9)
    assert [course.size(batch) for batch in range(3)] == [4, 4, 2]
    assert [course.alike(batch) for batch in range(3)] == [2, 1, 1]


def test_data_that_divides_has_no_short_batch():
    course = Course(length=8, batch_size=4, epochs=1)
    assert [course.size(batch) for batch in range(course.batches)] == [4, 4]


def test_data_shorter_than_a_batch_is_one_short_batch():
    course = Course(length=3, batch_size=8, epochs=2)
    assert (course.batches, course.size(0), course.alike(0)) == (1, 3, 1)


@properties
@given(courses)
def test_batches_cover_the_samples_exactly(course: Course):
    assert sum(course.size(batch) for batch in range(course.batches)) == course.length
    assert all(1 <= course.size(batch) <= course.batch_size for batch in range(course.batches))


@properties
@given(courses, st.data())
def test_alike_counts_the_run_of_equal_batches(course: Course, data: st.DataObject):
    batch = data.draw(st.integers(0, course.batches - 1))
    run = course.alike(batch)
    assert {course.size(batch + i) for i in range(run)} == {course.size(batch)}
    assert batch + run == course.batches or course.size(batch + run) != course.size(batch)


# A cursor


def test_a_cursor_moves_within_an_epoch_and_on_to_the_next():
    there = Cursor().advanced(2, ended=False)
    assert there == Cursor(epoch=0, batch=2, step=2)
    assert there.advanced(1, ended=True) == Cursor(epoch=1, batch=0, step=3)
    assert there.advanced(0, ended=False) == there


# Chunks


def test_the_rows_furthest_behind_decide_the_shape():
    held = {0: Course(8, 4, 3), 1: Course(10, 4, 3)}
    chunk = cut_from(held, {0: Cursor(1, 0, 2), 1: Cursor(0, 2, 2)}, max_steps=100)
    assert chunk == Chunk(rows=(1,), cursors=(Cursor(0, 2, 2),), size=2, steps=1, ends=(1,))


def test_rows_ahead_join_a_launch_of_their_shape():
    held = {0: Course(4, 4, 5), 1: Course(12, 4, 5)}
    chunk = cut_from(held, {0: Cursor(1, 0, 1), 1: Cursor(0, 1, 1)}, max_steps=100)
    assert chunk is not None
    assert (chunk.rows, chunk.size, chunk.steps) == ((0, 1), 4, 1)


def test_full_batches_come_before_tails():
    held = {0: Course(2, 4, 1), 1: Course(8, 4, 1)}
    chunk = cut_from(held, dict.fromkeys(held, Cursor()), max_steps=100)
    assert chunk is not None
    assert (chunk.rows, chunk.size, chunk.steps) == ((1,), 4, 2)


def test_a_chunk_is_no_longer_than_asked():
    chunk = cut_from({0: Course(100, 1, 1)}, {0: Cursor()}, max_steps=7)
    assert chunk is not None
    assert chunk.steps == 7


def test_there_is_no_chunk_when_all_have_ended():
    assert cut_from({0: Course(4, 4, 1)}, {0: Cursor(1, 0, 1)}, max_steps=1) is None
    assert cut_from({}, {}, max_steps=1) is None


def test_only_rows_whose_supply_is_used_up_end_an_epoch():
    supplied = {0: Supply(4, 2, ends=True), 1: Supply(4, 3, ends=True), 2: Supply(4, 2, ends=False)}
    chunk = cut(supplied, dict.fromkeys(supplied, Cursor()), max_steps=100)
    assert chunk is not None
    assert (chunk.steps, chunk.ends) == (2, (0,))
    assert chunk.shortened(1).ends == ()
    assert chunk.shortened(2) is chunk


def test_rows_that_were_left_out_of_the_courses_are_not_cut():
    held = {1: Course(4, 4, 1)}
    chunk = cut_from(held, {0: Cursor(), 1: Cursor(), 2: Cursor()}, max_steps=1)
    assert chunk is not None
    assert chunk.rows == (1,)


@properties
@given(groups, st.integers(1, 9))
def test_every_row_runs_each_of_its_batches_once_in_order(rows: list[Course], max_steps: int):
    ran: dict[int, list[tuple[int, int]]] = {row: [] for row in range(len(rows))}
    for chunk in simulated(rows, max_steps):
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            assert cursor.step == len(ran[row])
            ran[row] += [(cursor.epoch, cursor.batch + i) for i in range(chunk.steps)]
    for row, course in enumerate(rows):
        assert ran[row] == [
            (epoch, batch) for epoch in range(course.epochs) for batch in range(course.batches)
        ]


@properties
@given(groups, st.integers(1, 9))
def test_every_launch_has_one_shape_and_no_chunk_crosses_an_epoch(rows: list[Course], max_steps: int):
    for chunk in simulated(rows, max_steps):
        assert 1 <= chunk.steps <= max_steps
        assert len(set(chunk.rows)) == len(chunk.rows) == len(chunk.cursors) > 0
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            assert cursor.batch + chunk.steps <= rows[row].batches
            assert {rows[row].size(cursor.batch + i) for i in range(chunk.steps)} == {chunk.size}


@properties
@given(st.lists(st.builds(Course, st.integers(1, 40), st.just(5), st.integers(1, 4)), min_size=1, max_size=6))
def test_rows_stay_together_epoch_by_epoch(rows: list[Course]):
    """Every launch advances a row that is furthest behind, so none is left epochs behind the rest."""
    held = dict(enumerate(rows))
    cursors = dict.fromkeys(held, Cursor())
    while chunk := cut(supplies(held, cursors), cursors, max_steps=1 << 30):
        running = [row for row in held if cursors[row].epoch < held[row].epochs]
        assert min(cursors[row].epoch for row in running) in {cursor.epoch for cursor in chunk.cursors}
        for row in chunk.rows:
            cursors[row] = cursors[row].advanced(chunk.steps, row in chunk.ends)


# Counting them beforehand


@properties
@given(groups)
def test_launches_equal_a_simulation(rows: list[Course]):
    by_size: dict[int, int] = {}
    useful = 0
    for chunk in simulated(rows, 1 << 30):
        by_size[chunk.size] = by_size.get(chunk.size, 0) + chunk.steps
        useful += chunk.steps * len(chunk.rows)
    assert launches(rows) == Launches(by_size, useful, sum(by_size.values()) * len(rows))


@properties
@given(groups)
def test_useful_steps_are_all_the_steps_there_are(rows: list[Course]):
    counted = launches(rows)
    assert counted.useful == sum(course.steps for course in rows) <= counted.launched


def test_equal_rows_waste_nothing():
    counted = launches([Course(10, 4, 3)] * 1000)
    assert counted == Launches({4: 6, 2: 3}, useful=9000, launched=9000)


def test_thousands_of_equal_rows_are_counted_as_quickly_as_one(monkeypatch: pytest.MonkeyPatch):
    from carpool.planning import cursor

    calls: list[int] = []
    monkeypatch.setattr(cursor, "cut", lambda held, cursors, max_steps: calls.append(len(held)) or None)
    launches([Course(10, 4, 3)] * 5000 + [Course(8, 4, 3)] * 5000)
    assert calls == [2]


@properties
@given(
    st.lists(
        st.builds(Course, st.integers(1, 12), st.integers(2, 5), st.integers(1, 60)), min_size=1, max_size=4
    )
)
def test_epochs_that_repeat_are_counted_as_if_each_were_run(rows: list[Course]):
    by_size: dict[int, int] = {}
    for chunk in simulated(rows, 1 << 30):
        by_size[chunk.size] = by_size.get(chunk.size, 0) + chunk.steps
    counted = launches(rows)
    assert counted.by_size == by_size
    assert counted.useful == sum(course.steps for course in rows)


def test_millions_of_epochs_are_counted_as_quickly_as_a_few(monkeypatch: pytest.MonkeyPatch):
    from carpool.planning import cursor

    calls: list[int] = []
    real = cursor.cut
    monkeypatch.setattr(cursor, "cut", lambda *given, **how: calls.append(1) or real(*given, **how))
    counted = launches([Course(10, 4, 10**7), Course(7, 4, 10**6), Course(12, 3, 10**6 + 5)])
    assert counted.useful == 3 * 10**7 + 2 * 10**6 + 4 * (10**6 + 5)
    assert len(calls) < 200
