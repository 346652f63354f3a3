from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def own_programs(tmp_path_factory: pytest.TempPathFactory):
    """Programs of these tests are kept in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARPOOL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


CROSSES = {"test_equals_the_plain_loop_pairwise": 6}
"""Tests over many cases that each compile anew: so many are in the fast suite, and all in the slow one."""
FAST_CASES = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if item.fspath.basename == "test_jax_conformance.py":  # type: ignore[attr-defined]
            name = getattr(item, "originalname", "")
            seen[name] += 1
            if seen[name] > CROSSES.get(name, FAST_CASES):
                item.add_marker(pytest.mark.slow)
