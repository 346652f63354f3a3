"""The processor's cache: the last level of those that the process may run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.memory import cache

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four processors, two to a last level of 8 MiB, of which this process may use the first three."""
    for cpu in range(4):
        for index, (level, shared_by, size) in enumerate(
            [("1", str(cpu), "32K"), ("2", str(cpu), "1024K"), ("3", ("0-1", "2-3")[cpu // 2], "8M")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("shared_cpu_list", shared_by), ("size", size)):
                (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(cache, "_CPUS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    return tmp_path


@pytest.mark.parametrize(("threads", "expected"), [(1, 8 * MIB), (2, 16 * MIB), (64, 16 * MIB)])
def test_threads_reach_as_many_caches_as_there_are_threads(machine: Path, threads: int, expected: int):
    assert cache.cache_bytes(threads) == expected


def test_a_level_that_says_nothing_is_passed_over(machine: Path):
    for cpu in range(4):
        (machine / f"cpu{cpu}" / "cache" / "index2" / "size").write_text("\n")
    assert cache.cache_bytes(1) == MIB


def test_a_system_that_says_nothing_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "_CPUS", tmp_path)
    assert cache.cache_bytes(2) == 0
