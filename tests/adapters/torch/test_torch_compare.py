"""How far a fused step is from the steps alone: what is not finite counts, what is the same in both does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from carpool.adapters.torch.differences import Differences, _gap, _largest, _relative

INF, NAN = math.inf, math.nan


def rows(*values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_each_row_by_its_own_largest_value():
    found = _relative(rows([1, 2, 4], [10, 20, 40]), rows([1, 2, 5], [10, 20, 50]), None)
    assert found.tolist() == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_finite_on_one_side_only_is_a_difference(bad: float):
    for a, b in ((rows([1, 2]), rows([1, bad])), (rows([1, bad]), rows([1, 2]))):
        found = _relative(a, b, None)
        assert not found.item() <= 1e-2


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_infinite_on_both_sides_is_none(bad: float):
    assert _relative(rows([1, bad]), rows([1, bad]), None).item() == 0.0
    assert _largest(rows([1, bad, -3])).tolist() == [3.0]


def test_elements_that_do_not_count_are_left_out():
    gap = _gap(rows([1, 5]), rows([1, 2]), torch.tensor([[True, False]]))
    assert gap.tolist() == [[0.0, 0.0]]


def test_rows_of_numbers_integers_and_nothing():
    assert _relative(torch.tensor([3, 5]), torch.tensor([3, 4]), None).tolist() == [0.0, 0.25]
    assert _relative(torch.zeros(2, 0), torch.zeros(2, 0), None).tolist() == [0.0, 0.0]
    assert _relative(torch.tensor([1.0]), torch.tensor([True]), None).tolist() == [0.0]


def test_half_precision_does_not_overflow():
    a, b = rows([0.0, 1.0], dtype=torch.float16), rows([6e4, 1.0], dtype=torch.float16)
    assert _relative(a, b, None).item() == pytest.approx(1.0)


def test_the_place_furthest_beyond_what_it_allows_is_told():
    found = Differences(
        ["loss", "weights", "weights"], ["loss", "'a'", "'b'"], np.array([[1e-3], [0.02], [0.03]])
    )
    assert found.words(0, np.array([1e-2, 1e-2, 1e-2])) == "'b' by 3.0e-02 (allowed: 1e-02)"
    assert found.words(0, np.array([1e-2, 1e-2, 1e-1])) == "'a' by 2.0e-02 (allowed: 1e-02)"
    assert found.words(0, np.array([1e-2, 1e-1, 1e-1])) is None


def test_what_is_no_number_is_beyond_everything():
    assert Differences(["loss"], ["loss"], np.array([[INF]])).words(0, np.array([1e9])) is not None
