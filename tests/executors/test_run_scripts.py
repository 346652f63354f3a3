"""Real scripts side by side: output, crashes, caps, lines in wait, and Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import signal
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from carpool.executors import scripts as executor
from carpool.executors.interrupt import Bell
from carpool.executors.scripts import Terms, run
from carpool.process.child import Child
from carpool.reporters.prefixed import Prefixed
from carpool.scripts import Ended, Script

MIB = 1 << 20


class Stage:
    """Scripts written for a test, and what running them showed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown = io.BytesIO()
        self.terms = Terms(folder, jobs=8, environment={**os.environ, "PYTHONUNBUFFERED": "1"})

    def script(self, name: str, text: str) -> Script:
        path = self.folder / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        return Script(name, str(path))

    def run(self, *scripts: Script, bell: Bell | None = None, **terms: Any) -> dict[str, Ended]:
        with bell or Bell() as bell:
            ended = run(scripts, replace(self.terms, **terms), Prefixed(self.shown, False), bell)
        assert [each.name for each in ended] == [script.name for script in scripts]
        return {each.name: each for each in ended}

    def log(self, name: str) -> bytes:
        return (self.folder / f"{name}.log").read_bytes()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_output_is_shown_by_line_and_kept_whole(stage: Stage):
    a = stage.script("a", """
        import os, sys
        print(os.environ["CARPOOL_SCRIPT"])
        sys.stderr.write("an error\\n")
        sys.stdout.buffer.write(b"\\xff\\xfe\\npartial")
    """)  # fmt: skip
    ended = stage.run(a)["a"]
    assert (ended.code, ended.story) == (0, "")
    assert stage.log("a") == b"a\nan error\n\xff\xfe\npartial"
    assert stage.shown.getvalue() == b"a | a\na | an error\na | \xff\xfe\na | partial\n"


def test_much_output_is_kept_to_the_last_byte(stage: Stage):
    a = stage.script("a", "import sys; sys.stdout.buffer.write(b'0123456789\\n' * 200_000)")
    assert stage.run(a)["a"].code == 0
    assert len(stage.log("a")) == 2_200_000
    assert stage.shown.getvalue().count(b"\n") == 200_000


def test_a_crash_leaves_the_others_running(stage: Stage):
    """The second one ends only after it has seen the first one's death, which it waits for."""
    mark = stage.folder / "mark"
    os.mkfifo(mark)
    crash = stage.script("crash", f"""
        import os, signal
        file = open({str(mark)!r}, "w")
        os.kill(os.getpid(), signal.SIGSEGV)
    """)  # fmt: skip
    sound = stage.script("sound", f"print(repr(open({str(mark)!r}).read()), 'and on')")
    ended = stage.run(crash, sound)
    assert ended["crash"].code == -signal.SIGSEGV
    assert ended["sound"].code == 0
    assert stage.log("sound") == b"'' and on\n"


def test_codes_times_and_peaks_are_collected(stage: Stage):
    big = stage.script("big", f"x = bytearray({60 * MIB}); raise SystemExit(3)")
    ended = stage.run(big)["big"]
    assert ended.code == 3
    assert ended.seconds > 0
    assert 60 * MIB < (ended.peak_bytes or 0) < 200 * MIB


def test_a_program_that_cannot_be_started_says_why(stage: Stage):
    program = stage.folder / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    ended = stage.run(Script("broken", str(program)), stage.script("a", "print(1)"))
    assert ended["broken"].code == 127
    assert "FileNotFoundError" in ended["broken"].outcome
    assert not ended["broken"].is_completed
    assert ended["a"].is_completed


def test_one_that_cannot_be_started_leaves_the_others_running(stage: Stage):
    """Arguments that are too long for the system end their own script alone."""
    sound = stage.script("sound", "print(1)")
    ended = stage.run(replace(sound, name="long", arguments=("x" * 200_000,)), sound)
    assert ended["long"].story.startswith("not started: OSError")
    assert (ended["long"].code, ended["long"].is_completed) == (None, False)
    assert ended["sound"].is_completed


def test_one_for_which_there_are_no_descriptors_waits_until_others_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    tries: list[str] = []

    def child(command: Any, **options: Any) -> Child:
        tries.append(options["env"]["CARPOOL_SCRIPT"])
        if len(tries) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return Child(command, **options)

    monkeypatch.setattr(executor, "Child", child)
    ended = stage.run(*(stage.script(name, "print(1)") for name in "ab"))
    assert all(each.is_completed for each in ended.values())
    assert tries == ["a", "b", "b"]


NOTE = """
    import os
    def note(text):
        file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, (text + " " + os.environ["CARPOOL_SCRIPT"] + "\\n").encode())
    note("start")
    note("end")
"""


@pytest.mark.parametrize(
    "terms", [{"jobs": 1}, {"cap_bytes": 60, "capacity_bytes": 100, "is_host_memory": False}]
)
def test_what_does_not_fit_beside_the_others_waits_in_line(stage: Stage, terms: dict[str, Any]):
    notes = stage.folder / "notes"
    names = ["a", "b", "c"]
    ended = stage.run(*(stage.script(name, NOTE.format(path=str(notes))) for name in names), **terms)
    assert all(each.is_completed for each in ended.values())
    assert notes.read_text().splitlines() == [f"{what} {name}" for name in names for what in ("start", "end")]


def test_what_fits_runs_at_the_same_time(stage: Stage):
    """Each of the two waits for the other, through pipes that open only when both ends are there."""
    one, two = stage.folder / "one", stage.folder / "two"
    for mark in (one, two):
        os.mkfifo(mark)
    a = stage.script("a", f"open({str(one)!r}, 'w').close(); open({str(two)!r}).read()")
    b = stage.script("b", f"open({str(one)!r}).read(); open({str(two)!r}, 'w').close()")
    ended = stage.run(a, b, cap_bytes=50, capacity_bytes=100, is_host_memory=False)
    assert all(each.is_completed for each in ended.values())


GREEDY = f"""
    import time
    held = bytearray({400 * MIB})
    for position in range(0, len(held), 4096): held[position] = 1
    print("holding")
    time.sleep(600)
"""


def test_over_its_cap_a_script_is_stopped_with_its_story(stage: Stage):
    greedy, modest = stage.script("greedy", GREEDY), stage.script("modest", "print('fine')")
    ended = stage.run(greedy, modest, cap_bytes=200 * MIB, capacity_bytes=2000 * MIB)
    assert ended["modest"].is_completed
    assert ended["greedy"].code == -signal.SIGTERM
    assert ended["greedy"].story.startswith("stopped at ")
    assert ended["greedy"].story.endswith("of memory, over its cap of 200 MiB")
    assert (ended["greedy"].peak_bytes or 0) > 200 * MIB
    assert ended["greedy"].story.encode() in stage.log("greedy")
    assert b"greedy | carpool: stopped at " in stage.shown.getvalue()


def test_a_cap_on_the_gpu_does_not_stop_for_host_memory(stage: Stage):
    big = stage.script(
        "big", f"import time; x = bytearray({300 * MIB}); x[::4096] = b'1' * len(x[::4096]); time.sleep(0.5)"
    )
    ended = stage.run(big, cap_bytes=100 * MIB, capacity_bytes=100 * MIB, is_host_memory=False)
    assert ended["big"].is_completed


class Ringing(Bell):
    """Ctrl-C as soon as a script has said that it is there, as often as it says so."""

    def __init__(self, log: io.BytesIO) -> None:
        super().__init__()
        self._log = log

    def heard(self) -> int:
        self.rung = self._log.getvalue().count(b"there")
        return super().heard()


STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, lambda *_: print("there again" if {again} else "no"))
    print("there")
    while True: time.sleep(600)
"""


@pytest.mark.parametrize(("again", "grace_s"), [(False, 0.1), (True, 600.0)], ids=["grace", "second bell"])
def test_the_bell_ends_all_of_them_the_stubborn_too(stage: Stage, again: bool, grace_s: float):
    stubborn = stage.script("stubborn", STUBBORN.format(again=again))
    waiting = stage.script("waiting", "print('never')")
    ended = stage.run(stubborn, waiting, bell=Ringing(stage.shown), jobs=1, grace_s=grace_s)
    assert (ended["stubborn"].code, ended["stubborn"].outcome) == (-signal.SIGKILL, "interrupted")
    assert (ended["waiting"].code, ended["waiting"].outcome) == (None, "not started")
    assert b"never" not in stage.shown.getvalue()


def test_the_bell_lets_the_polite_say_goodbye(stage: Stage):
    polite = stage.script("polite", """
        import signal, sys, time
        def leave(*_):
            print("goodbye")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("there")
        while True: time.sleep(600)
    """)  # fmt: skip
    ended = stage.run(polite, bell=Ringing(stage.shown), grace_s=600.0)["polite"]
    assert (ended.code, ended.outcome, ended.is_completed) == (0, "interrupted", False)
    assert stage.log("polite") == b"there\ngoodbye\n"


def test_ctrl_c_rings_the_bell_and_raises_nothing():
    with Bell() as bell:
        assert bell.heard() == 0
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert bell.heard() == 2
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_in_another_thread_there_is_no_bell_and_no_failure(stage: Stage):
    ended: dict[str, Ended] = {}
    thread = threading.Thread(target=lambda: ended.update(stage.run(stage.script("a", "print(1)"))))
    thread.start()
    thread.join()
    assert ended["a"].is_completed
