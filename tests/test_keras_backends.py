"""The Keras tests on the other backends: a process loads one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "adapters" / "keras"


def run(backend: str, *arguments: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": backend}
    for name in [name for name in environment if name.startswith(("PYTEST_", "JAX_"))]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_the_tests_of_a_backends_own_pass(backend):
    run(backend, str(FOLDER / f"test_keras_{backend}.py"), str(FOLDER / "test_keras_generators.py"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_all_keras_tests_pass(backend):
    run(backend, str(FOLDER), "-m", "not gpu")
