"""When a group is cut into narrower stacks: by a clear margin, and never for a run too short to notice."""

from __future__ import annotations

import pytest

from carpool.planning.cursor import SLICE_S, Course
from carpool.planning.narrowing import (
    CHUNK_S,
    WINS,
    Narrowing,
    confirming,
    narrower,
    worth_confirming,
    worth_trying,
)

LONG = [Course(6400, 64, 100)] * 64  # 10,000 launches, a hundred of them an epoch


@pytest.mark.parametrize(
    ("members", "widths"),
    [
        (1, ()),
        (7, ()),
        (8, (4,)),
        (31, (4,)),
        (32, (16, 4)),
        (256, (64, 16, 4)),
        (257, (52, 16)),
        (5000, (1000, 250)),
    ],
)
def test_a_few_widths_are_tried(members: int, widths: tuple[int, ...]):
    assert narrower(members) == widths


def test_no_more_than_three_widths_are_ever_tried():
    assert max(len(narrower(members)) for members in range(1, 5000)) == 3


def test_a_run_must_be_long_enough_to_pay_for_the_trying():
    assert worth_trying(64, num_launches=10_000, together_s=0.001)
    assert not worth_trying(64, num_launches=1000, together_s=0.001)
    assert not worth_trying(64, num_launches=10, together_s=10.0)  # timing alone would take longer


@pytest.mark.parametrize(("width", "widths"), [(64, (64, 16)), (16, (16, 4)), (4, (4,))])
def test_the_fastest_width_and_the_next_are_tried_compiled(width: int, widths: tuple[int, ...]):
    assert confirming(256, width) == widths


def test_compiling_several_widths_needs_a_longer_run_than_compiling_one():
    assert worth_confirming(1, num_launches=2500, together_s=0.1, compile_s=6.0)
    assert not worth_confirming(2, num_launches=1400, together_s=0.1, compile_s=6.0)
    assert not worth_confirming(1, num_launches=2500, together_s=0.1, compile_s=60.0)


@pytest.mark.parametrize(("gain", "best"), [(1.01, 16), (0.99, 64)])
def test_a_narrower_stack_must_be_clearly_faster(gain: float, best: int):
    turn = 1 + CHUNK_S / SLICE_S  # what a turn's chunk adds to its launches
    narrowing = Narrowing(members=64, together_s=WINS * gain * turn * 4, width=16, narrow_s=1.0)
    assert narrowing.best(LONG) == best


def test_what_the_host_does_for_each_stack_counts():
    narrowing = Narrowing(members=64, together_s=5 * CHUNK_S, width=16, narrow_s=CHUNK_S)
    assert narrowing.best(LONG) == 64 // 4
    one_step_epochs = [Course(64, 64, 10_000)] * 64
    assert narrowing.best(one_step_epochs) == 64


def test_the_last_stack_counts_also_where_it_is_not_full():
    assert Narrowing(members=65, together_s=1.0, width=16, narrow_s=1.0).parts == 5


def test_a_short_run_stays_whole_whatever_was_measured():
    narrowing = Narrowing(members=64, together_s=0.1, width=16, narrow_s=0.001)
    assert narrowing.best(LONG) == 16
    assert narrowing.best([Course(64, 64, 2)]) == 64


def test_the_sentence_says_both_widths_whatever_was_chosen():
    narrowing = Narrowing(members=64, together_s=0.0064, width=16, narrow_s=0.0032, compiled=True)
    assert narrowing.told(16) == (
        "stacks of 16: a member's step takes 0.2 ms there, 0.1 ms in one of 64 (compiled)"
    )
    assert narrowing.told(64) == (
        "one stack: a member's step takes 0.1 ms there, 0.2 ms in stacks of 16 (compiled)"
    )
