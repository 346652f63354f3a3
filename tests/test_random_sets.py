"""Random sets of jobs through the public API: each job ends where it ends alone, and where a plain loop ends.

A failing seed prints a line that repeats it. What two correct runs may differ in is left out where the sets are made, with the reason:
parameters whose true gradient is zero under adaptive optimizers, and early stopping that the last bit decides.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import random_sets
from patience import PATIENCE_S

CHUNK = 50
FULL = {"torch": 1400, "jax": 300, "keras": 200}
"""How many sets of each framework the slow suite runs; with Keras on torch, in a process of its own, 2,000."""
KERAS_ON_TORCH = 100


def run(framework: str, first: int, count: int) -> random_sets.Tally:
    """All of the sets, also where some of them do not hold."""
    total, wrong = random_sets.Tally(), []
    for seed in range(first, first + count):
        try:
            total.add(random_sets.check(framework, seed))
        except random_sets.Mismatch as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)
    return total


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("framework", "count"), [("torch", 9), ("jax", 1)])
def test_a_few_random_sets_end_as_each_of_their_jobs_alone(framework: str, count: int):
    assert run(framework, 0, count).jobs >= count


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("framework", "first"),
    [(framework, first) for framework, count in FULL.items() for first in range(0, count, CHUNK)],
)
def test_random_sets_end_as_each_of_their_jobs_alone(framework: str, first: int):
    assert run(framework, first, CHUNK).sets == CHUNK


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_random_sets_of_keras_on_torch_end_as_each_of_their_jobs_alone():
    script = str(Path(random_sets.__file__))
    env = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script, "keras", "0", str(KERAS_ON_TORCH)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
