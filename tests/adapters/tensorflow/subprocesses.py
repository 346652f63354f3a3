"""Programs in a process of their own: what has to be said before TensorFlow starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from patience import PATIENCE_S

HERE = Path(__file__).parent


def run(program: str, **environment: str) -> str:
    """What the program prints; raises with all it said where it fails."""
    path = os.pathsep.join([str(HERE), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": "tensorflow", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended.stdout
