"""`index=` in one place for every framework: positions or a mask, and nothing that only looks like one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import carpool
from carpool.errors import DataError
from carpool.positions import positions

NESTED = "pass positions as whole numbers in one list or array"
WRONG: list[tuple[Any, str]] = [
    ([True, False], "index as a mask of 6, one for each sample. Received: a mask of 2"),
    (np.ones(7, bool), "index as a mask of 6, one for each sample. Received: a mask of 7"),
    (torch.ones(5, dtype=torch.bool), "a mask of 5"),
    ([0.0, 1.0], "index of whole numbers or a mask. Received: float64"),
    (np.array([1.5]), "index of whole numbers or a mask"),
    (torch.tensor([2.9]), "index of whole numbers or a mask"),
    ([[0, 1], [2, 3]], r"index in one dimension. Received: an array of shape \(2, 2\)"),
    (np.zeros((6, 1), bool), r"an array of shape \(6, 1\)"),
    ([[0], [1, 2]], "index of positions or a mask"),
    ([True, 2], "index of whole numbers or a mask. Received: both"),
    (3, "index in one dimension. Received: 3"),
    ("012", "index in one dimension"),
    ({0, 1}, "index in one dimension"),
    (["0", "1"], "index of whole numbers or a mask"),
    ([None, 1], "index of whole numbers or a mask"),
    ([], "at least one sample in index. Received: 0"),
    (np.zeros(6, bool), "at least one sample in index. Received: 0"),
    ([-1], r"index within 0\.\.5. Received: -1\.\.-1"),
    ([0, 6], r"index within 0\.\.5. Received: 0\.\.6"),
    (np.array([2**63 + 1], np.uint64), r"index within 0\.\.5"),
    ([2**70], "index of whole numbers or a mask"),
]


@pytest.mark.parametrize(("index", "said"), WRONG, ids=[repr(index)[:30] for index, _ in WRONG])
def test_what_is_neither_positions_nor_a_mask_is_refused(index: Any, said: str):
    with pytest.raises(DataError, match=rf"^Job 'a': Expected .*{said}"):
        positions(index, 6, "a")


@pytest.mark.parametrize(
    "index",
    [
        [3, 1, 1],
        (3, 1, 1),
        np.array([3, 1, 1], np.uint8),
        torch.tensor([3, 1, 1]),
        (number for number in ()),
    ],
    ids=["list", "tuple", "array", "tensor", "nothing"],
)
def test_positions_keep_their_order_and_their_repeats(index: Any):
    if not hasattr(index, "__len__"):
        with pytest.raises(DataError, match="index in one dimension"):
            positions(index, 6)
        return
    found = positions(index, 6)
    assert found is not None
    assert (found.dtype, found.tolist()) == (np.int64, [3, 1, 1])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_mask_is_the_places_where_it_is_true(kind: Callable[[Any], Any]):
    found = positions(kind([False, True, True, False]), 4)
    assert found is not None
    assert found.tolist() == [1, 2]


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> Any:
        return torch.ones(2), torch.ones(1)


@pytest.mark.parametrize("data", [(torch.ones(6, 2), torch.ones(6, 1)), Samples()], ids=["arrays", "dataset"])
@pytest.mark.parametrize(("index", "said"), [WRONG[0], WRONG[3], WRONG[6]], ids=["mask", "floats", "nested"])
def test_a_torch_job_refuses_them_before_anything_runs(data: Any, index: Any, said: str):
    job = carpool.Job(
        lambda: torch.nn.Linear(2, 1),
        data,
        loss=torch.nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        index=index,
        name="a",
    )
    with pytest.raises(DataError, match=rf"^Job 'a': Expected .*{said}"):
        carpool.plan([job], device="cpu")
