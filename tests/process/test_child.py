"""Commands as children, with the failures that leave orphans behind elsewhere."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from carpool.process import child as processes
from carpool.process.child import Child
from carpool.testing.processes import gone, many_descriptors, may_open
from patience import PATIENCE_S

PYTHON = sys.executable


def script(text):
    return [PYTHON, "-c", textwrap.dedent(text)]


def read_pid(path, within_s=PATIENCE_S):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.01)
    raise AssertionError(f"nothing in {path}")


SLEEPER = "import time; time.sleep(600)"


def test_output_code_environment_and_folder(tmp_path):
    command = script("import os, sys; print(os.environ['COLOUR'], os.getcwd()); sys.exit(7)")
    with Child(command, env={**os.environ, "COLOUR": "red"}, cwd=tmp_path, stdout=subprocess.PIPE) as child:
        assert child.wait(PATIENCE_S) == 7
        assert child.stdout is not None
        assert child.stdout.read().decode().split() == ["red", str(tmp_path)]


def test_a_command_that_does_not_exist_says_so():
    with Child(["/no/such/command"]) as child:
        assert child.wait(PATIENCE_S) == 127
        assert "FileNotFoundError" in str(child.error)


def test_a_signal_is_a_negative_code():
    with Child(script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")) as child:
        assert child.wait(PATIENCE_S) == -signal.SIGSEGV


def test_waiting_ends_with_the_timeout():
    with Child([PYTHON, "-c", SLEEPER]) as child:
        assert child.wait(0.01) is None
        assert child.poll() is None
        pid = child.pid
    assert pid is not None
    assert gone(pid)


def test_one_that_ignores_terminate_is_killed(tmp_path):
    mark = tmp_path / "ready"
    command = script(f"""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(mark)!r}, "w").write("1\\n")
        time.sleep(600)
    """)
    with Child(command) as child:
        read_pid(mark)
        assert child.stop(grace_s=0.1) == -signal.SIGKILL


def test_grandchildren_end_with_it_even_in_a_session_of_their_own(tmp_path):
    mark = tmp_path / "pid"
    command = script(f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
        open({str(mark)!r}, "w").write(f"{{child.pid}}\\n")
    """)
    with Child(command) as child:
        grandchild = read_pid(mark)
        assert child.wait(PATIENCE_S) == 0
    assert gone(grandchild)


def test_killing_us_ends_the_command_and_what_it_started(tmp_path):
    """`kill -9` of the parent: every child is gone."""
    marks = [tmp_path / "child", tmp_path / "grandchild"]
    inner = textwrap.dedent(f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
        open({str(marks[1])!r}, "w").write(f"{{child.pid}}\\n")
        time.sleep(600)
    """)
    parent = subprocess.Popen(
        script(f"""
            import sys, time
            from carpool.process.child import Child
            child = Child([sys.executable, "-c", {inner!r}])
            open({str(marks[0])!r}, "w").write(f"{{child.pid}}\\n")
            time.sleep(600)
        """)
    )
    pids = [read_pid(mark) for mark in marks]
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in pids)


def test_host_memory_of_the_whole_tree_is_seen(tmp_path):
    if not Path("/proc/self/statm").exists():
        pytest.skip("the system does not tell")
    mark = tmp_path / "ready"
    held = f"x = bytearray(200 << 20); open({str(mark)!r}, 'w').write('1\\n'); import time; time.sleep(600)"
    with Child(script(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {held!r}])")) as child:
        read_pid(mark)
        assert (child.rss_bytes() or 0) > 200 << 20


MARKED = f"""
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
    open({{mark!r}}, "w").write(f"{{{{child.pid}}}}\\n")
    {{rest}}
"""
"""Starts a process in a session of its own and tells it."""


def killed_leash(child):
    os.kill(child._leash.pid, signal.SIGKILL)
    child._leash.wait()


def test_a_killed_leash_is_replaced_and_the_command_goes_on(tmp_path):
    """A killed leash: the command goes on, ends as it is told to, and nothing of it is left."""
    mark = tmp_path / "pid"
    with Child(script(MARKED.format(mark=str(mark), rest="time.sleep(600)"))) as child:
        pids = child.pid, read_pid(mark)
        for _ in range(2):
            number = child.fileno()
            killed_leash(child)
            assert child.poll() is None
            assert (child.pid, child.fileno()) == (pids[0], number)
        assert not any(gone(pid, within_s=0.1) for pid in pids)
        child.terminate()
        assert child.wait(PATIENCE_S) is not None
    assert all(gone(pid) for pid in pids)


def test_after_a_killed_leash_the_end_is_noticed(tmp_path):
    mark, go = tmp_path / "pid", tmp_path / "go"
    os.mkfifo(go)
    with Child(script(MARKED.format(mark=str(mark), rest=f"open({str(go)!r}).close()"))) as child:
        grandchild = read_pid(mark)
        killed_leash(child)
        assert child.poll() is None
        go.write_text("")
        assert child.wait(PATIENCE_S) == 255
        assert child.error == "the process that watched it was killed, so how it ended is not known"
    assert gone(grandchild)


def test_a_killed_leash_does_not_let_the_command_outlive_us(tmp_path):
    marks = [tmp_path / "child", tmp_path / "grandchild"]
    inner = textwrap.dedent(MARKED.format(mark=str(marks[1]), rest="time.sleep(600)"))
    parent = subprocess.Popen(
        script(f"""
            import os, signal, sys, time
            from carpool.process.child import Child
            child = Child([sys.executable, "-c", {inner!r}])
            os.kill(child._leash.pid, signal.SIGKILL)
            child._leash.wait()
            assert child.poll() is None
            open({str(marks[0])!r}, "w").write(f"{{child.pid}}\\n")
            time.sleep(600)
        """)
    )
    pids = [read_pid(mark) for mark in marks]
    parent.kill()
    parent.wait()
    assert all(gone(pid) for pid in pids)


def test_where_no_other_leash_can_be_started_the_command_ends(tmp_path, monkeypatch):
    mark = tmp_path / "pid"
    with Child(script(MARKED.format(mark=str(mark), rest="time.sleep(600)"))) as child:
        pids = child.pid, read_pid(mark)
        killed_leash(child)

        def full(*_, **__):
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(processes, "_leashed", full)
        assert child.poll() == -signal.SIGKILL
        assert "no other can be started" in str(child.error)
    assert all(gone(pid) for pid in pids)


MANY = """
    import resource, socket, subprocess, sys
    from carpool.process.child import Child
    held = [socket.socket() for _ in range(1200)]
    with Child([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE) as child:
        assert child.fileno() > 1024
        assert child.wait() == 0
        print(child.stdout.read().decode().strip())
    with Child([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        assert child.wait(0.01) is None
        print(child.stop())
"""


@pytest.mark.skipif(not may_open(1500), reason="this process may not open so many")
def test_more_descriptors_than_select_takes():
    """More than 1,024 open descriptors."""
    ran = subprocess.run(script(MANY), capture_output=True, text=True, preexec_fn=many_descriptors)
    assert (ran.stdout, ran.stderr) == ("1\n-15\n", "")
