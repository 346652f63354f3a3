"""Values from JSON of any shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pytest

from carpool.fields import value_of
from carpool.planning.holds import Hold
from carpool.planning.trials import Trial

TRIAL = Trial(8, 0.25, 0.125, True, "products")


@dataclass(frozen=True)
class Dated:
    on: str | None
    taken_s: float | None = None


def test_fields_that_fit_are_the_value():
    assert value_of(Trial, asdict(TRIAL)) == TRIAL
    assert value_of(Trial, {"members": 2, "together_s": 1, "alone_s": 2}) == Trial(2, 1, 2)
    assert value_of(Hold, {"share": 0.0, "step_s": 0.5}) == Hold(0.0, 0.5)
    assert value_of(Dated, {"on": None}) == Dated(None)
    assert value_of(Dated, {"on": "monday", "taken_s": 1.5}) == Dated("monday", 1.5)


@pytest.mark.parametrize("found", [None, 3, 1.5, "text", [], [["members", 2]], {}, {"other": 1}, {1: 2}])
def test_another_shape_is_no_value(found: Any):
    assert value_of(Trial, found) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": "8"},
        {"members": 8.0},
        {"members": True},
        {"members": 0},
        {"members": 10**400},
        {"together_s": None},
        {"together_s": "fast"},
        {"together_s": [0.1]},
        {"together_s": {"a": 1}},
        {"together_s": float("nan")},
        {"together_s": float("inf")},
        {"together_s": 10**400},
        {"together_s": 0.0},
        {"alone_s": -1.0},
        {"alone_s": False},
        {"compiled": 1},
        {"form": 3},
        {"more": 1},
    ],
    ids=str,
)
def test_one_field_of_another_type_is_no_value(wrong: dict[str, Any]):
    """A `trials.json` of another shape is not believed: such a trial would stop the run that asks it."""
    assert value_of(Trial, {**asdict(TRIAL), **wrong}) is None
