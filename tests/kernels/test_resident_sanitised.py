"""The generated code under the sanitisers for addresses and for undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from carpool import machine
from patience import PATIENCE_S

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1"
NETS = range(0, 48, 2)


def runtime() -> str | None:
    """GCC's library for addresses, if it is there."""
    gcc = shutil.which("gcc")
    if gcc is None or machine.unavailable() is not None:
        return None
    found = subprocess.run(
        [gcc, "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    return found if os.sep in found else None


@pytest.mark.slow
@pytest.mark.skipif(runtime() is None, reason="no gcc with libasan")
@pytest.mark.parametrize("first", range(4))
def test_the_code_of_nets_reads_and_writes_nothing_but_its_own(first: int, tmp_path: Path):
    numbers = [str(number) for number in NETS[first::4]]
    here = Path(__file__).parent
    env = os.environ | {
        "CC": f"gcc {FLAGS}",
        "CARPOOL_CACHE": str(tmp_path),
        "LD_PRELOAD": runtime() or "",
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0",
        "PYTHONPATH": os.pathsep.join([str(here), *sys.path]),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-W", "ignore", str(here / "resident_sanitised.py"), *numbers]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.split()[1::2] == numbers
