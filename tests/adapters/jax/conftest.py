from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from carpool.adapters.jax import programs
from carpool.adapters.jax.session import StackedSession

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Most of the time of these tests is compiling: quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def own_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of these tests are kept in one folder: those of one kind are compiled once."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(autouse=True)
def shared_programs(
    untried: Path, own_programs: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.setattr(programs, "_folder", lambda: own_programs)
    if "trials" not in request.fixturenames:
        monkeypatch.setattr(StackedSession, "trial", lambda session, chunk: None)
