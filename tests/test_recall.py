"""Trials on disk: found again by their key, and never a reason to fail."""

from __future__ import annotations

import json
import time
from pathlib import Path

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


def test_it_says_on_which_day_it_was_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recall.time, "time", lambda: 1_000_000_000.0)
    recall.remember("a", Trial(8, 0.25, 0.125))
    found = recall.remembered("a")
    assert found is not None
    assert found.origin == "measured on this device on 2001-09-09"


def test_a_measurement_expires(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recall.time, "time", lambda: 1e9)
    recall.remember("a", Trial(8, 0.25, 0.125))
    monkeypatch.setattr(recall.time, "time", lambda: 1e9 + recall.EXPIRES_S - 1)
    assert recall.remembered("a") is not None
    monkeypatch.setattr(recall.time, "time", lambda: 1e9 + recall.EXPIRES_S)
    assert recall.remembered("a") is None


def test_a_measurement_of_other_versions_does_not_count(monkeypatch: pytest.MonkeyPatch):
    recall.remember("a", Trial(8, 0.25, 0.125))
    monkeypatch.setattr(recall, "_versions", lambda: {"torch": "99"})
    assert recall.remembered("a") is None


def test_what_a_busy_machine_showed_stays_in_this_process(monkeypatch: pytest.MonkeyPatch):
    recall.remember("a", Trial(8, 0.25, 0.125), busy=True)
    assert recall.remembered("a") == Trial(8, 0.25, 0.125)
    assert recall.count() == 0
    monkeypatch.setattr(recall, "_here", {})  # as in the next process
    assert recall.remembered("a") is None


def test_forgetting_drops_everything():
    recall.remember("a", Trial(8, 0.25, 0.125))
    recall.remember("b", Trial(8, 0.25, 0.125), busy=True)
    assert recall.forget() == 2
    assert recall.remembered("a") is recall.remembered("b") is None
    assert recall.forget() == 0


def test_only_so_many_are_kept_the_newest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recall, "_MOST", 2)
    for key in "abc":
        recall.remember(key, Trial(1, 1.0, 1.0))
    assert [key for key in "abc" if recall.remembered(key)] == ["b", "c"]


def _file(values: object, **other: object) -> str:
    record = {"values": values, "at": time.time(), "versions": recall._versions(), **other}
    return json.dumps({"format": 2, "measured": {"a": record}})


GOOD = {"members": 2, "together_s": 1.0, "alone_s": 1.0, "compiled": False, "form": ""}


def test_the_file_that_the_next_test_spoils_is_good(untried: Path):
    (untried / "trials.json").write_text(_file(GOOD))
    assert recall.remembered("a") == Trial(2, 1.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"a": {"other": 1}}',
        '{"format": 2, "measured": [1]}',
        '{"format": 2, "measured": {"a": 3}}',
        '{"format": 2, "measured": {"a": {"values": 3}}}',
        _file([1, 2]),
        _file({**GOOD, "other": 1}),
        _file({**GOOD, "together_s": "1"}),
        _file({**GOOD, "together_s": -1.0}),
        _file({**GOOD, "alone_s": float("nan")}),
        _file({**GOOD, "members": None}),
        _file(GOOD, at="yesterday"),
        _file(GOOD, at=True),
        _file(GOOD, versions=[]),
    ],
)
def test_a_file_that_makes_no_sense_is_an_empty_one(untried: Path, text: str):
    """A `trials.json` of another shape: what makes no sense is as if it was not there."""
    (untried / "trials.json").write_text(text)
    assert recall.remembered("a") is None
    recall.remember("b", Trial(1, 1.0, 1.0))
    assert recall.remembered("b") == Trial(1, 1.0, 1.0)


def test_a_folder_that_cannot_be_written_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CARPOOL_CACHE", str(tmp_path / "file" / "below"))
    recall.remember("a", Trial(1, 1.0, 1.0))
    assert recall.remembered("a") is None
