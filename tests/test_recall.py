"""Trials on disk: found again by their key, and never a reason to fail."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from carpool import recall
from carpool.planning.holds import Hold
from carpool.planning.trials import Trial


def test_a_trial_is_found_again_by_its_key():
    trial = Trial(8, 0.25, 0.125, compiled=True)
    recall.remember("a", trial)
    recall.remember("b", Trial(2, 1.0, 1.0))
    assert recall.remembered("a") == trial
    assert recall.remembered("c") is None


def test_a_hold_is_found_again_and_is_no_trial():
    hold = Hold(0.5, 0.25)
    recall.remember("a", hold)
    assert recall.remembered("a", Hold) == hold
    assert recall.remembered("a") is None


def test_the_newest_trial_of_a_key_counts():
    recall.remember("a", Trial(8, 0.25, 0.125))
    recall.remember("a", Trial(8, 0.5, 0.125))
    assert recall.remembered("a") == Trial(8, 0.5, 0.125)


def test_only_so_many_are_kept_the_newest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recall, "_MOST", 2)
    for key in "abc":
        recall.remember(key, Trial(1, 1.0, 1.0))
    assert [key for key in "abc" if recall.remembered(key)] == ["b", "c"]


@pytest.mark.parametrize(
    "found", [3, "x", None, [1], [[]], {}, {"other": 1}, {"members": "8", "together_s": [], "alone_s": 1}]
)
def test_a_trial_of_another_shape_is_none_and_goes_with_the_next(untried: Path, found: Any):
    """A `trials.json` of another shape: what makes no sense is as if it was not there."""
    (untried / "trials.json").write_text(json.dumps({"a": found, "b": asdict(Trial(1, 1.0, 1.0))}))
    assert recall.remembered("a") is None
    assert recall.remembered("b") == Trial(1, 1.0, 1.0)
    recall.remember("c", Trial(2, 1.0, 1.0))
    kept = json.loads((untried / "trials.json").read_text())
    assert all(isinstance(value, dict) for value in kept.values())


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_file_that_makes_no_sense_is_an_empty_one(untried: Path, text: str):
    (untried / "trials.json").write_text(text)
    assert recall.remembered("a") is None
    recall.remember("b", Trial(1, 1.0, 1.0))
    assert recall.remembered("b") == Trial(1, 1.0, 1.0)


def test_a_folder_that_cannot_be_written_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CARPOOL_CACHE", str(tmp_path / "file" / "below"))
    recall.remember("a", Trial(1, 1.0, 1.0))
    assert recall.remembered("a") is None
