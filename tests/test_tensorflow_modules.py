"""The tests of TensorFlow modules: in a process of their own, where Keras' optimizers are on TensorFlow."""

from pathlib import Path

import pytest

from test_keras_backends import run

FOLDER = Path(__file__).parent / "adapters" / "tensorflow"
FILES = sorted(str(path) for path in FOLDER.glob("test_modules_*.py"))


def test_the_tests_of_modules_pass():
    assert len(FILES) >= 6
    run("tensorflow", *FILES)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_tests_of_modules_pass():
    run("tensorflow", *FILES, "-m", "not gpu")
