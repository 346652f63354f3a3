"""Measurements that a noisy machine cannot spoil: ways take turns, medians count, and windows that disagree do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from carpool import windows


def ways(*taken: list[float]) -> list[Callable[[], float]]:
    """Ways that take these seconds, one after another."""
    return [partial(next, itertools.cycle(own)) for own in taken]


def test_one_disturbed_window_changes_nothing():
    first = [9.0, 1.0, 1.0, 50.0, 1.0, 1.0]  # what is first does not count
    found = windows.measured(ways(first, [0.5]))
    assert found.seconds == (1.0, 0.5)
    assert found.agrees


def test_windows_that_disagree_are_known_by_it():
    assert not windows.measured(ways([1.0, 1.0, 5.0, 1.0, 5.0, 2.0], [1.0])).agrees


def test_the_ways_take_turns():
    order: list[str] = []

    def way(name: str) -> float:
        order.append(name)
        return 1.0

    windows.measured([partial(way, "a"), partial(way, "b")], most=3)
    assert order == ["a", "b"] * 4


def test_long_windows_are_few(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(0.0, 2.0)
    monkeypatch.setattr(windows.time, "perf_counter", lambda: next(clock))
    left = iter([1.0] * 9)
    windows.measured([lambda: next(left)])
    assert len(list(left)) == 7, "one that does not count, and one that says enough"


def test_waiting_for_a_processor_is_a_share_of_what_could_have_run(monkeypatch: pytest.MonkeyPatch):
    states = iter([(100, 50), (190, 60), (1090, 60)])
    monkeypatch.setattr(windows, "_scheduled", lambda: next(states))
    waited = windows.Waited()
    assert waited.share() == 0.1
    monkeypatch.setattr(windows, "_scheduled", lambda: (100, 50))
    assert waited.share() == 0.0


@pytest.mark.parametrize("text", ["", "x y z"])
def test_a_system_that_does_not_tell_is_never_busy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
):
    (tmp_path / "schedstat").write_text(text)
    monkeypatch.setattr(windows, "_threads", lambda: [tmp_path, tmp_path / "gone"])
    assert windows.Waited().share() == 0.0
