"""Tests of modules run with Keras on TensorFlow, for its optimizers: in a process of their own (tests/test_tensorflow_modules.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IS_OURS = os.environ.get("KERAS_BACKEND") == "tensorflow"
collect_ignore = [] if IS_OURS else [path.name for path in HERE.glob("test_modules_*.py")]
sys.path.insert(0, str(HERE))


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    if IS_OURS and "trials" not in request.fixturenames:
        from carpool.adapters.tensorflow.session import RowsSession

        monkeypatch.setattr(RowsSession, "trial", lambda session, chunk: None)
