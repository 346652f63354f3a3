"""One thread a test process: two busy threads on two contended cores are many times slower than one.

Nothing is timed to choose a strategy, but where a test asks for it (`trials`): on a busy machine that would choose at random.
"""

import atexit
import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

from carpool import windows
from carpool.adapters.torch.fused import StackedSession
from carpool.adapters.torch.train import TorchAdapter
from carpool.memory.maps import crowded

os.environ.setdefault(
    "KERAS_BACKEND", "jax"
)  # a process has one; tests/test_keras_backends.py runs the others
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# JAX reads these when it is imported, by whichever test comes first. Most of the time of its tests is compiling: quickly rather
# than well, and models of one kind once for all tests of a process (two that write one cache would read halves of files).
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="carpool-jax-")
atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so begins what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and none of them timed: beside a busy neighbour each takes as long as it takes.
hypothesis.settings.register_profile(
    "carpool",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.filter_too_much,
    ],
)
hypothesis.settings.load_profile("carpool")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def untried(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A cache of the test's own, and no trials."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CARPOOL_CACHE", str(cache))
    if "trials" not in request.fixturenames:
        monkeypatch.setattr(StackedSession, "trial", lambda session, chunk: None)
        monkeypatch.setattr(TorchAdapter, "hold", lambda adapter, job, measure: None)
    return cache


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is about trials: they are made, as on a machine that nobody else uses."""
    monkeypatch.setattr(windows.Waited, "share", lambda waited: 0.0)
    monkeypatch.setattr(windows, "agree", lambda _: True)


_torn_down = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """What JAX compiled for hundreds of tests is let go before XLA crashes for it; counting takes milliseconds, so now and then."""
    jax = sys.modules.get("jax")
    if jax is not None and next(_torn_down) % 16 == 0 and crowded():
        jax.clear_caches()
        gc.collect()


FIRST = ("test_keras_backends.py", "test_tensorflow_modules.py", "test_sources.py")
"""Each test of these runs many in a process of its own: begun last, it would leave the other worker without work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)
