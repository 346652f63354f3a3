"""Workers: what they find when they start, what they say, and how their ends are told. Real processes, each test."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from carpool.errors import WorkerError
from carpool.process import supervisor
from carpool.process import worker as inside
from carpool.process.messages import Call, News, Raised, Returned
from carpool.process.supervisor import Supervisor
from carpool.testing.processes import gone, many_descriptors, may_open
from patience import PATIENCE_S


@pytest.fixture
def worker():
    with Supervisor() as one:
        yield one


def answer(worker, function, *arguments, **keywords):
    worker.call(Call(function, arguments, keywords))
    return worker.wait(PATIENCE_S)


def test_a_worker_calls_what_it_is_given_one_after_another(worker):
    offset = 3
    assert answer(worker, lambda x, by=1: x * by + offset, 2, by=10) == Returned(23)
    assert answer(worker, sorted, [2, 1]) == Returned([1, 2])


def test_the_environment_is_set_before_a_framework_is_imported(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with Supervisor(env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}) as worker:
        assert answer(worker, lambda: __import__("torch").get_num_threads()) == Returned(1)
        assert worker.started is not None
        assert worker.started.environment["OMP_NUM_THREADS"] == "1"
        assert worker.started.environment["CUDA_VISIBLE_DEVICES"] == ""
        assert worker.started.frameworks == ()


def test_frameworks_that_were_imported_would_be_told():
    """The list above is empty because nothing was imported, not because nobody looked."""
    assert "torch" in inside._FRAMEWORKS
    assert "torch" in inside.imported()


def test_what_can_be_imported_here_can_be_imported_there(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def seven(): return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    with Supervisor() as worker:
        assert answer(worker, only_here.seven) == Returned(7)


def test_arrays_in_and_out(worker):
    x, t = np.arange(200_000.0), torch.arange(200_000.0)
    found = answer(worker, lambda x, t: (x + 1, t * 2), x, t)
    assert isinstance(found, Returned)
    np.testing.assert_array_equal(found.value[0], x + 1)
    assert torch.equal(found.value[1], t * 2)


def test_news_comes_before_the_end(worker):
    def function():
        inside.tell("half")
        return "all"

    worker.call(Call(function))
    assert worker.wait(PATIENCE_S) == News("half")
    assert worker.wait(PATIENCE_S) == Returned("all")


def test_a_beat_tells_what_the_worker_holds(worker):
    pause = 2.5 * inside.BEAT_S
    answer(worker, time.sleep, pause)
    assert worker.beat.rss_bytes > 10_000_000
    assert worker.peak_rss_bytes >= worker.beat.rss_bytes
    assert worker.beat.device_bytes is None


# Errors


def test_an_exception_comes_back_as_itself_with_its_traceback(worker):
    def function():
        raise KeyError("lost")

    found = answer(worker, function)
    assert isinstance(found, Raised)
    assert type(found.error) is KeyError
    assert found.error.args == ("lost",)
    assert "in function" in "".join(found.error.__notes__)


class Demanding(Exception):
    """Pickles, and cannot be made again."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


def test_an_exception_that_cannot_travel_comes_as_text(worker):
    def function():
        raise Demanding(7, "no way")

    found = answer(worker, function)
    assert isinstance(found, Raised)
    assert type(found.error) is WorkerError
    assert "Demanding: 7: no way" in str(found.error)
    assert "in function" in str(found.error)


def test_a_value_that_cannot_travel_is_an_error_and_the_worker_goes_on(worker):
    found = answer(worker, threading.Lock)
    assert isinstance(found, Raised)
    assert "Expected a worker's function to return what can be pickled" in str(found.error)
    assert answer(worker, int) == Returned(0)


def test_a_call_that_cannot_be_read_there_is_an_error(worker, tmp_path, monkeypatch):
    (tmp_path / "gone_by_then.py").write_text("def function(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import gone_by_then  # type: ignore[import-not-found]

    found = answer(worker, gone_by_then.function)
    assert isinstance(found, Raised)
    assert isinstance(found.error, ModuleNotFoundError)


def test_ctrl_c_reaches_the_function_and_not_the_worker(worker):
    def function():
        inside.tell("here")
        time.sleep(PATIENCE_S)

    worker.call(Call(function))
    assert worker.wait(PATIENCE_S) == News("here")
    worker.interrupt()
    found = worker.wait(PATIENCE_S)
    assert isinstance(found, Raised)
    assert isinstance(found.error, KeyboardInterrupt)
    worker.interrupt()  # between calls
    assert answer(worker, int) == Returned(0)


# Ends


def crash(how):
    import sys

    print("the last thing I did", file=sys.stderr, flush=True)
    os.kill(os.getpid(), how) if how > 0 else os._exit(-how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGSEGV, "was killed by SIGSEGV"),
        (-5, "ended with exit code 5"),
    ],
)
def test_a_worker_that_dies_says_how_and_what_it_wrote(worker, how, words):
    worker.call(Call(crash, (how,)))
    with pytest.raises(WorkerError, match=words) as raised:
        worker.wait(PATIENCE_S)
    assert "the last thing I did" in str(raised.value)


def test_a_worker_that_hangs_is_stopped_and_says_where_it_was():
    def waits_for_ever():
        inside.tell("here")
        threading.Event().wait()

    with Supervisor() as worker:
        worker.call(Call(waits_for_ever))
        assert worker.wait(PATIENCE_S) == News("here")
        worker.timeout_s = 2.0
        with pytest.raises(WorkerError, match=r"no progress for 2 s") as raised:
            worker.wait(PATIENCE_S)
        assert "in waits_for_ever" in str(raised.value)
        assert gone(worker.pid)


def test_a_worker_whose_threads_run_says_where_it_is_and_goes_on(worker, tmp_path):
    end = tmp_path / "end"

    def parses(stop):
        while not stop.is_set():
            [Path(f"/a/{number}") / "b" for number in range(20)]

    def runs_threads():
        stop = threading.Event()
        threads = [threading.Thread(target=parses, args=(stop,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        inside.tell("here")
        while not end.exists():
            time.sleep(0.01)
        stop.set()
        return "done"

    worker.call(Call(runs_threads))
    assert worker.wait(PATIENCE_S) == News("here")
    stories = [worker.stacks() for _ in range(5)]
    end.touch()
    assert all("in runs_threads" in story and "in parses" in story for story in stories)
    assert worker.wait(PATIENCE_S) == Returned("done")


def test_a_worker_that_keeps_the_lock_says_where_it_is():
    def keeps_the_lock():
        inside.tell("here")
        ctypes.PyDLL(None).pause()

    with Supervisor() as worker:
        worker.call(Call(keeps_the_lock))
        assert worker.wait(PATIENCE_S) == News("here")
        assert "in keeps_the_lock" in worker.stacks()


def test_an_answer_that_comes_late_is_not_the_next_one(worker, monkeypatch):
    monkeypatch.setattr(supervisor, "_STACKS_S", 1.0)

    def keeps_the_lock_a_while():
        inside.tell("here")
        ctypes.PyDLL(None).sleep(30)  # the signal that asks ends it early
        ctypes.PyDLL(None).sleep(1)
        then_waits()

    def then_waits():
        inside.tell("free")
        threading.Event().wait()

    worker.call(Call(keeps_the_lock_a_while))
    assert worker.wait(PATIENCE_S) == News("here")
    assert "in keeps_the_lock_a_while" in worker.stacks()
    assert worker.wait(PATIENCE_S) == News("free")
    monkeypatch.undo()
    assert "in then_waits" in worker.stacks()


@pytest.mark.slow
def test_news_is_progress():
    def goes_on():
        for _ in range(12):
            time.sleep(0.5)
            inside.tell("on")

    with Supervisor() as worker:
        worker.call(Call(goes_on))
        assert worker.wait(PATIENCE_S) == News("on")
        worker.timeout_s = 5.0  # less than all of it takes
        while isinstance(found := worker.wait(PATIENCE_S), News):
            pass
        assert found == Returned(None)


def test_nothing_is_left_of_a_worker_that_will_not_end():
    def stubborn():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        inside.tell(os.getpid())
        while True:
            time.sleep(1)

    before = threading.active_count()
    with Supervisor() as worker:
        worker.call(Call(stubborn))
        found = worker.wait(PATIENCE_S)
        assert isinstance(found, News)
    assert gone(found.content)
    assert threading.active_count() == before


def test_a_worker_that_nobody_holds_any_more_ends():
    worker = Supervisor()
    assert answer(worker, int) == Returned(0)
    pid = worker.pid
    del worker
    assert gone(pid)


def test_a_killed_leash_does_not_end_the_call_nor_leave_its_worker():
    """A killed leash: the worker goes on, and is stopped as any other."""

    def work(go):
        while not Path(go).exists():
            time.sleep(0.01)
        return os.getpid()

    with tempfile.TemporaryDirectory() as folder, Supervisor() as worker:
        go = Path(folder, "go")
        worker.call(Call(work, (str(go),)))
        while worker.started is None:
            assert worker.wait(0.01) is None
        held = worker._child._leash
        held.kill()
        held.wait()
        assert worker.poll() is None
        go.touch()
        assert worker.wait(PATIENCE_S) == Returned(worker.pid)
        pid = worker.pid
    assert gone(pid)


MANY = """
import os, socket
from types import SimpleNamespace
import carpool
from carpool.executors import isolated
held = [socket.socket() for _ in range(1200)]
near, far = socket.socketpair()
far.send(b"1")
isolated.wait([SimpleNamespace(worker=near)])
print(*(result.value for result in carpool.map(lambda x: 2 * x, [1, 2, 3], workers=2)), near.fileno() > 1024)
"""


@pytest.mark.skipif(not may_open(1500), reason="this process may not open so many")
def test_more_descriptors_than_select_takes():
    """More than 1,024 open descriptors: workers and those who wait for them."""
    ran = subprocess.run(
        [sys.executable, "-c", MANY], capture_output=True, text=True, preexec_fn=many_descriptors
    )
    assert (ran.stdout, ran.stderr) == ("2 4 6 True\n", "")
