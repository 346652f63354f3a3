from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from carpool.adapters.jax.session import StackedSession

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Most of the time of these tests is compiling: quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    if "trials" not in request.fixturenames:
        monkeypatch.setattr(StackedSession, "trial", lambda session, chunk: None)
