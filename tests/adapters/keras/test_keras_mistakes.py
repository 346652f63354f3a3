"""The most common mistakes with Keras models: each gets one error that says what was expected, what came and what to do."""

from __future__ import annotations

from typing import Any

import keras_zoo as zoo
import numpy as np
import pytest

import carpool
from carpool.errors import DataError

x, y = np.ones((26, 5), "float32"), np.zeros(26, "int32")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (np.arange(26) < 9, None),
        ([True, False], "index as a mask of 26"),
        ([0.0, 1.0], "index of whole numbers"),
        ([[0, 1]], "index in one dimension"),
    ],
)
def test_an_index_is_positions_or_a_mask(index: Any, said: str | None):
    job = carpool.Job(zoo.sequential(), (x, y), name="a", index=index)
    if said is None:
        assert "26" not in carpool.plan([job], device="cpu").explain()
        return
    with pytest.raises(DataError, match=rf"^Job 'a': Expected {said}"):
        carpool.plan([job], device="cpu")


@pytest.mark.parametrize("is_built", [False, True])
def test_data_of_another_width_is_refused_with_what_keras_says(
    is_built: bool, capfd: pytest.CaptureFixture[str]
):
    model = zoo.sequential()
    if is_built:
        model.fit(x, y, verbose=0)
    with pytest.raises(
        DataError, match=r"^Job 'a': Expected data that its model takes. Received: .*6.*each"
    ) as caught:
        carpool.fit({"a": model}, np.ones((26, 6), "float32"), y)
    assert "\x1b" not in str(caught.value)
    assert is_built or "Input 0" in str(caught.value.__cause__)
    assert capfd.readouterr() == ("", "")


def test_an_index_beside_batches_is_refused():
    def batches():
        yield x[:4], y[:4]

    job = carpool.Job(zoo.sequential(), batches(), name="a", index=[0, 1])
    with pytest.raises(DataError, match=r"^Job 'a': Expected index= beside arrays. Received: generator"):
        carpool.plan([job], device="cpu")
