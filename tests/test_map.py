"""`carpool.map`, with real processes: order, crashes, arrays, lambdas, Ctrl-C, and nothing left running."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import carpool
from carpool.environment import cores
from carpool.errors import OptionError, WorkerError
from carpool.result import Outcome
from carpool.testing.processes import children
from patience import PATIENCE_S


def values(results):
    return [result.value for result in results]


@pytest.fixture(autouse=True)
def nothing_left():
    before = children()
    yield
    assert children() <= before


def test_results_come_in_the_order_of_the_configs(tmp_path):
    """The first config ends last: it waits for a file that the fifth writes."""
    end = tmp_path / "end"

    def tenfold(x):
        if x == 0:
            time.sleep(0.1)
        while x == 0 and not end.exists():
            time.sleep(0.01)
        if x == 4:
            end.touch()
        return x * 10

    results = carpool.map(tenfold, range(5), workers=2)
    assert values(results) == [0, 10, 20, 30, 40]
    assert [result.name for result in results] == [f"config-{i}" for i in range(5)]
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert results[0].seconds >= 0.1
    assert all(result.seconds > 0 for result in results)


def test_mappings_are_keyword_arguments_and_configs_of_results():
    results = carpool.map(lambda lr, seed=0: lr + seed, [{"lr": 1.0}, {"lr": 2.0, "seed": 3}], workers=1)
    assert values(results) == [1.0, 5.0]
    assert results[1].config == {"lr": 2.0, "seed": 3}
    assert carpool.map(len, [(1, 2)], workers=1)[0].config == {"argument": (1, 2)}


def test_no_configs_no_results():
    assert len(carpool.map(len, [])) == 0


def test_calls_run_in_processes_of_their_own_side_by_side(tmp_path):
    """Each of two calls waits for a file that only the other writes."""

    def meet(me, other):
        (tmp_path / me).touch()
        while not (tmp_path / other).exists():
            time.sleep(0.01)
        return os.getpid()

    configs = [{"me": "a", "other": "b"}, {"me": "b", "other": "a"}]
    a, b = values(carpool.map(meet, configs, workers=2, timeout_s=PATIENCE_S))
    assert len({a, b, os.getpid()}) == 3


def test_a_worker_is_used_again():
    assert len(set(values(carpool.map(lambda _: os.getpid(), range(4), workers=1)))) == 1


def test_what_raises_is_a_value_and_the_others_go_on():
    results = carpool.map(lambda x: 1 / x, [1, 0, 2], workers=1)
    assert values(results) == [1.0, None, 0.5]
    assert results[1].outcome is Outcome.FAILED
    assert isinstance(results[1].error, ZeroDivisionError)
    assert [result.name for result in results.failed] == ["config-1"]


def test_a_crash_fails_its_config_and_its_worker_is_replaced():
    def perhaps_crash(x):
        if x == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return os.getpid()

    results = carpool.map(perhaps_crash, range(3), workers=1)
    assert [result.outcome.word for result in results] == ["completed", "failed", "completed"]
    assert isinstance(results[1].error, WorkerError)
    assert "was killed by SIGSEGV" in str(results[1].error)
    assert "in perhaps_crash" in str(results[1].error)  # where it was, from its last lines
    assert results[0].value != results[2].value


def test_big_arrays_in_and_out_and_one_array_in_memory_once():
    """All workers map one block: the inode of the memory behind an array is the same in each."""
    x, t = np.arange(1_000_000.0), torch.arange(1_000_000.0)

    def function(x, t, by):
        address, inode = x.__array_interface__["data"][0], None
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            inode = line.split()[4] if start <= address < end else inode
        x += by  # seen by this call alone
        return x, t * by, inode

    results = carpool.map(function, [{"x": x, "t": t, "by": by} for by in (1, 2, 3)], workers=2)
    for by, (sums, products, _) in zip((1, 2, 3), values(results), strict=True):
        np.testing.assert_array_equal(sums, np.arange(1_000_000.0) + by)
        assert torch.equal(products, t * by)
    inodes = {inode for _, _, inode in values(results)}
    assert len(inodes) == 1
    assert inodes != {"0"}
    np.testing.assert_array_equal(x, np.arange(1_000_000.0))


@pytest.mark.slow
def test_a_call_that_takes_too_long_fails_and_says_where_it_was():
    def perhaps_hang(x):
        if x:
            threading.Event().wait()
        return x

    results = carpool.map(perhaps_hang, [1, 0], workers=1, timeout_s=5)
    assert "no progress for 5 s" in str(results[0].error)
    assert "in perhaps_hang" in str(results[0].error)
    assert results[1].value == 0


def test_a_worker_that_holds_too_much_is_stopped():
    def hold(size):
        held = np.ones(size // 8)
        time.sleep(PATIENCE_S)
        return len(held)

    results = carpool.map(hold, [500_000_000], workers=1, memory="300MB")
    assert isinstance(results[0].error, WorkerError)
    assert "is its part" in str(results[0].error)


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = values(carpool.map(lambda _: os.environ["OMP_NUM_THREADS"], range(2), workers=2))
    assert found == [str(max(1, cores() // 2))] * 2


INTERRUPTED = """
import os, sys, time, carpool

def function(x):
    if x == 0:
        return "done"
    print(os.getpid(), flush=True)
    time.sleep(600)

try:
    carpool.map(function, range(4), workers=2)
except carpool.Interrupted as interrupted:
    print([(r.outcome.word, r.value) for r in interrupted.results], flush=True)
"""


def test_ctrl_c_stops_all_and_hands_over_the_results_so_far():
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED)], stdout=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdout is not None
        pids = [int(ran.stdout.readline()) for _ in range(2)]
        os.kill(ran.pid, signal.SIGINT)
        text = ran.stdout.read()
        assert ran.wait(PATIENCE_S) == 0
    left = [("completed", "done"), *[("interrupted", None)] * 3]
    assert text.strip() == str(left)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# Misuse


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, 'workers="auto" or a number'),
        ({"workers": "many"}, 'workers="auto" or a number'),
        ({"workers": True}, 'workers="auto" or a number'),
        ({"timeout_s": 0}, "a timeout_s above 0"),
        ({"memory": "much"}, 'memory="auto"'),
    ],
)
def test_misuse_raises(options, words):
    with pytest.raises(OptionError, match=words):
        carpool.map(len, ["a"], **options)


def test_what_cannot_be_pickled_raises_before_anything_runs(tmp_path):
    with pytest.raises(OptionError, match="the config at position 1"):
        carpool.map(lambda x: (tmp_path / "ran").touch(), [1, threading.Lock()])
    lock = threading.Lock()
    with pytest.raises(OptionError, match="a function that can be pickled"):
        carpool.map(lambda x: lock.locked(), [1])
    with pytest.raises(OptionError, match="a function"):
        carpool.map(3, [1])  # type: ignore[arg-type]
    assert not (tmp_path / "ran").exists()
