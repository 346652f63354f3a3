"""Functions over lists of tensors, taken apart: equal to torch's own, and batched by vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carpool.kernels.random import Keyed
from carpool.kernels.table import alone, stacked

lists: Any = torch
CALLS = {
    "add": lambda a, b, rate: lists._foreach_add(a, b, alpha=0.5),
    "add_": lambda a, b, rate: lists._foreach_add_(a, b, alpha=-1),
    "mul": lambda a, b, rate: lists._foreach_mul(a, rate),
    "div": lambda a, b, rate: lists._foreach_div(a, b),
    "maximum_": lambda a, b, rate: lists._foreach_maximum_(a, b),
    "sqrt": lambda a, b, rate: lists._foreach_sqrt(b),
    "abs": lambda a, b, rate: lists._foreach_abs(a),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_over_lists_is_the_same_in_a_stack(name):
    def member(a, b, rate):
        own = [a.clone(), a * 2]
        made = CALLS[name](own, [b, b + 1], rate)
        return tuple(own if made is None else made)

    a, b, rate = torch.randn(3, 4), torch.rand(3, 4) + 0.1, torch.rand(3)

    def in_a_stack(*given):
        with stacked(0, 0):
            return member(*given)

    together = torch.vmap(in_a_stack)(a, b, rate)
    for row in range(3):
        for ours, theirs in zip(together, member(a[row], b[row], rate[row]), strict=True):
            torch.testing.assert_close(ours[row], theirs)


def test_a_factor_that_is_a_tensor_is_not_read_on_the_host():
    a, rate = torch.ones(3), torch.tensor(0.5)
    with alone(0, 0):
        lists._foreach_add_([a], [torch.ones(3)], alpha=-rate)
    torch.testing.assert_close(a, torch.full((3,), 0.5))


def test_normal_and_randint_are_keyed():
    def drawn(seed: int) -> list[torch.Tensor]:
        with Keyed(seed, 1):
            return [
                torch.normal(1.0, 2.0, size=(5,)),
                torch.normal(torch.zeros(5), 2.0),
                torch.randint(3, 9, (50,)),
                torch.randint(9, (50,)),
                torch.randint(low=3, high=9, size=(50,), dtype=torch.int32),
            ]

    first, again, other = drawn(0), drawn(0), drawn(1)
    for one, same, another in zip(first, again, other, strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=0)
        assert not torch.equal(one, another)
    for numbers, least in ((first[2], 3), (first[3], 0), (first[4], 3)):
        assert int(numbers.min()) == least
        assert int(numbers.max()) == 8
    assert first[4].dtype == torch.int32
