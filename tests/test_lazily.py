"""What is there after `import carpool`, though nothing imports it before it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import carpool
from patience import PATIENCE_S

LATER = ["doctor", "jax", "kernels", "tensorflow", "testing"]
ASKED = """
import sys
import carpool
import types
before = set(sys.modules)
assert not before & {"torch", "jax", "keras", "tensorflow"}
assert set(sys.argv[2:]) <= set(dir(carpool))
assert not set(sys.modules) & {"torch", "jax", "keras", "tensorflow"}
assert isinstance(eval(sys.argv[1]), (types.ModuleType, types.FunctionType)), sys.argv[1]
"""


@pytest.mark.parametrize(
    "asked",
    ["carpool.doctor.examine", "carpool.kernels", "carpool.kernels.updates.register", "carpool.testing"],
)
def test_modules_are_there_when_they_are_asked_for(asked: str):
    ran = subprocess.run(
        [sys.executable, "-c", ASKED, asked, *LATER], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", LATER)
def test_each_is_named_by_dir(name: str):
    assert name in dir(carpool)
    assert set(carpool.__all__) <= set(dir(carpool))


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        carpool.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        carpool.kernels.nothing  # noqa: B018


def test_what_is_for_tensorflow_and_jax_is_there():
    """In this process, where the frameworks may be imported already."""
    assert callable(carpool.tensorflow.sessions)
    assert callable(carpool.jax.population)
