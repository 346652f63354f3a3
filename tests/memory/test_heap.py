"""The heap is kept between steps, given back after a run, and left to whoever has set it up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from carpool.memory import heap

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")

FAULTS = """
import resource, sys
import numpy as np
from carpool.memory import heap
if sys.argv[1] == "kept":
    assert heap.keep()

def step():
    held = [np.ones(30 << 17) for _ in range(3)]

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

faults(3)
print(faults(10))
before = resident()
heap.give_back()
print(before - resident())
"""


def run(how: str) -> list[int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        capture_output=True,
        text=True,
        check=True,
        env={**plain, "NUMPY_MADVISE_HUGEPAGE": "0"},
    )
    return [int(word) for word in done.stdout.split()]


@glibc
def test_steps_pay_no_page_faults_and_nothing_is_kept_for_good():
    kept, given_back = run("kept")
    left, _ = run("left")
    assert left > 10_000 > kept
    assert given_back > 10_000


def test_who_has_set_the_allocator_up_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    heap.keep.cache_clear()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setattr(heap, "_function", lambda name: pytest.fail(f"{name} was called"))
    try:
        assert not heap.keep()
        heap.give_back()
    finally:
        heap.keep.cache_clear()


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    heap.keep.cache_clear()
    monkeypatch.setattr(heap, "_function", lambda name: None)
    try:
        assert not heap.keep()
    finally:
        heap.keep.cache_clear()
