"""What a group is expected to take."""

from __future__ import annotations

from collections.abc import Hashable

from carpool.memory.estimate import Estimate, estimate
from carpool.planning.cursor import Course
from carpool.planning.spec import ModelSpec


def spec(state_bytes: int, step_bytes: int, data: tuple[tuple[Hashable, int], ...] = ()) -> ModelSpec:
    return ModelSpec("a", "torch", (), Course(8, 4, 1), state_bytes, step_bytes, data)


def test_the_total_is_the_fixed_part_and_every_member():
    assert Estimate(fixed_bytes=100, member_bytes=7, members=3).total_bytes == 121


def test_shared_arrays_count_once_and_distinct_ones_each():
    shared, own = ("x", 50), ("y", 20)
    assert estimate([spec(1, 1, (shared,)), spec(1, 1, (shared, own))]).fixed_bytes == 70


def test_a_member_is_as_large_as_the_largest():
    made = estimate([spec(10, 5), spec(2, 20), spec(12, 1)])
    assert (made.member_bytes, made.members, made.total_bytes) == (22, 3, 66)
