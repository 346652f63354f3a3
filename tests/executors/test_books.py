"""Metrics kept in columns become, number by number, what they become row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool.adapters.base import MetricColumns
from carpool.executors.books import Books, Entry
from carpool.executors.member import Member
from carpool.planning.cursor import Course


def members(count: int) -> dict[int, Member]:
    jobs = [carpool.Job("net", ([0], [0]), name=str(row), loss=max) for row in range(count)]
    return {row: Member(job, Course(8, 4, 3)) for row, job in enumerate(jobs)}


def columns(rows: tuple[int, ...], values: list[float], steps: int) -> MetricColumns:
    taken = np.full(len(rows), steps)
    sums = {
        "loss": np.asarray(values[: len(rows)]),
        "accuracy": np.asarray(values[: len(rows)], np.float32) / 3,
    }
    return MetricColumns(
        rows, taken, taken * 4, {k: v.astype(np.float64) for k, v in sums.items()}, np.zeros(len(rows), bool)
    )


chunks = st.lists(
    st.tuples(
        st.sampled_from([(0, 1, 2), (0, 2)]),
        st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
        st.integers(1, 5),
        st.sampled_from(["goes on", "ends", "ends, validated"]),
    ),
    min_size=1,
    max_size=12,
)


@given(chunks, st.integers(1, 12))
def test_columns_become_what_rows_become(found, write_every):
    """However often they are written, and whoever sits a chunk out."""
    ours, theirs, books = members(3), members(3), Books()
    for place, (rows, values, steps, how) in enumerate(found):
        shown, ends = columns(rows, values, steps), how != "goes on"
        validated = columns(rows, values[::-1], 7) if how == "ends, validated" else None
        books.add(Entry(shown, ends, validated))
        for row in shown:
            theirs[row.row].count(row)
        for row in rows if ends else ():
            means = {
                f"val_{n}": total / r.samples
                for r in validated or ()
                for n, total in r.sums.items()
                if r.row == row
            }
            theirs[row].end_epoch(theirs[row].epoch_metrics() | means)
        if place % write_every == 0:
            books.write(ours)
    books.write(ours)
    for row in theirs:
        for word in ("history", "steps", "samples", "sums", "epochs_ended", "steps_at_end"):
            assert getattr(ours[row], word) == getattr(theirs[row], word), (row, word)


def test_books_say_when_they_are_full():
    books, held = Books(), members(1)
    while not books.is_full:
        books.add(Entry(columns((0,), [1.0], 1), ends=True))
    books.write(held)
    assert not books.is_full
    assert len(held[0].history["loss"]) == held[0].epochs_ended == held[0].steps > 1
