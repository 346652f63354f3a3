"""What is remembered goes where the process has many parts of memory."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from carpool.memory import maps


def files(monkeypatch: pytest.MonkeyPatch, folder: Path, taken: int, most: str) -> None:
    for name, text in (("_MAPS", "line\n" * taken), ("_MOST", most)):
        path = folder / name
        path.write_text(text)
        monkeypatch.setattr(maps, name, path)


@pytest.mark.parametrize(
    ("taken", "most", "crowded"), [(51, "100", True), (50, "100", False), (9, "?", False)]
)
def test_half_of_what_linux_allows_is_crowded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: int, most: str, crowded: bool
):
    files(monkeypatch, tmp_path, taken, most)
    assert maps.crowded() is crowded


def test_where_nobody_can_tell_it_never_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(maps, "_MAPS", tmp_path / "none")
    assert not maps.crowded()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crowded", "count", "left"),
    [(False, 3, [0, 1, 2]), (False, 6, [2, 3, 4, 5]), (True, 6, [3, 4, 5]), (True, 1, [0]), (True, 0, [])],
)
def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch, crowded: bool, count: int, left: list[int]):
    monkeypatch.setattr(maps, "crowded", lambda: crowded)
    kept = OrderedDict.fromkeys(range(count))
    maps.thin(kept, most=4)
    assert list(kept) == left
