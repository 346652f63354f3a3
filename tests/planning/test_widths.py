"""How wide a stack is, and when a narrower one or a compiled one pays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.memory.estimate import Estimate
from carpool.planning.widths import bucket, compiling_budget_s, repacked, slices, width_limit

properties = settings(max_examples=150)


def member(size_bytes: int, **parts: Any) -> Estimate:
    return Estimate(fixed_bytes=parts.pop("fixed_bytes", 0), member_bytes=size_bytes, members=1, **parts)


def test_the_width_leaves_headroom():
    assert width_limit(member(100), free_bytes=1000) == 8
    assert width_limit(member(100), free_bytes=999) == 7


def test_the_width_is_at_least_one():
    assert width_limit(member(100), free_bytes=10) == 1
    assert width_limit(member(100), free_bytes=0) == 1


def test_data_and_what_the_check_takes_are_not_for_members():
    assert width_limit(member(100, fixed_bytes=500), free_bytes=1500) == 8
    assert width_limit(member(100, check_bytes=300), free_bytes=1000) == 5


def test_a_narrow_stack_takes_less_to_be_checked():
    checked = Estimate(0, 100, members=8, check_bytes=800, measured=True, checked_bytes=100)
    assert width_limit(checked, free_bytes=1000) == 4  # 400 and 400, of 900
    bounded = Estimate(0, 100, members=8, check_bytes=200, measured=True, checked_bytes=100)
    assert width_limit(bounded, free_bytes=1000) == 7  # 700 and 200


def test_a_measured_width_needs_less_headroom():
    assert width_limit(member(100, measured=True), free_bytes=1000) == 9


def test_a_member_without_bytes_has_some_width():
    assert width_limit(member(0), free_bytes=100) == 80


@properties
@given(st.integers(1, 200), st.integers(1, 50))
def test_slices_are_few_even_and_complete(count: int, limit: int):
    parts = slices(range(count), limit)
    assert [member for part in parts for member in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-count // limit)


@properties
@given(st.integers(1, 5000))
def test_a_bucket_is_the_next_power_of_two(active: int):
    width = bucket(active)
    assert width.bit_count() == 1
    assert width // 2 < active <= width


@properties
@given(st.integers(1, 300), st.data(), st.integers(0, 10_000), st.floats(0, 10), st.floats(0, 100))
def test_repacking_always_fits_and_always_pays(
    width: int, data: st.DataObject, left: int, launch_s: float, prepare_s: float
):
    active = data.draw(st.integers(1, width))
    target = repacked(width, active, left, launch_s, prepare_s)
    if target is not None:
        assert active <= target <= width // 2
        assert left * launch_s * (1 - target / width) > prepare_s


@pytest.mark.parametrize(
    ("active", "left", "expected"),
    [(7, 1000, 8), (7, 100, None), (33, 10**9, None), (32, 1000, 32), (1, 1000, 1)],
)
def test_repacking_weighs_the_saving_against_preparing(active: int, left: int, expected: int | None):
    assert repacked(width=64, active=active, launches_left=left, launch_s=0.01, prepare_s=2.0) == expected


def test_compiling_may_take_half_of_what_it_would_save_and_never_more_than_minutes():
    assert compiling_budget_s(12.0) == 6.0
    assert compiling_budget_s(1e6) == 300.0
