"""Machine code of C source: by any compiler, however it fails, and whatever happened to what was kept."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import carpool
from carpool import cache, machine, private, processor
from carpool.machine import compilers, kept, targets
from carpool.process.child import Child
from carpool.processor import Processor
from patience import PATIENCE_S

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what belongs to somebody else")
SOURCE = "int answer(void) { return 42; }"
REAL = '$REAL "$@"'  # a compiler that does its work
HANGS = "/bin/sleep 1000 & echo $! $$ > PIDS.new; /bin/mv PIDS.new PIDS; wait"
VERSION = 'case "$*" in *--version*) echo "fake 1.0"; exit 0;; esac\n'
V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "sse2"})
ZEN_5 = Processor("x86_64", "", V3 | targets._V4.keys(), "AuthenticAMD", 26)


QUICK = f"""#!/bin/sh
PATH=/usr/bin:/bin
read -r text < program.c
case "$* $text" in
  *--version*) echo "quick 1.0"; exit;;
  *"{SOURCE.partition("42")[0]}"*) number=${{text#*return }}; made=$(dirname "$0")/${{number%%;*}}.so;;
  *) exec CC "$@";;
esac
[ -e "$made" ] || {{ CC "$@" && cp program.so "$made.$$" && mv "$made.$$" "$made"; }} && cp "$made" program.so
"""


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The machine's compiler, which compiles each answer once."""
    real = shutil.which("cc")
    assert real is not None, "the machine that tests has a C compiler"
    script = tmp_path_factory.mktemp("quick") / "cc"
    script.write_text(QUICK.replace("CC", real))
    script.chmod(0o755)
    return script


@pytest.fixture(autouse=True)
def asked_nothing_yet(quick: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(quick.parent), prepend=os.pathsep)
    monkeypatch.setenv("REAL", str(quick))
    cache._say_once.cache_clear()
    machine._desk.cache_clear()
    yield
    compilers.kill_all()
    machine._desk.cache_clear()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, of the test's own: nothing may stay in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a shell script that is the only compiler on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(body: str, name: str = "cc", version: str = VERSION) -> Path:
        script = folder / name
        script.write_text(f"#!/bin/sh\n{version}{body}\n")
        script.chmod(0o755)
        return script

    return write


def counted(log: Path) -> str:
    """A compiler that does its work, and counts it."""
    return f'echo "$@" >> {log}\nexec {REAL}'


def refusal(source: str = SOURCE) -> str:
    """Why there is no machine code of it: told the same by every way to ask."""
    with pytest.raises(machine.NoMachineCode) as told:
        machine.made(source)
    assert str(machine.begin(source).exception(PATIENCE_S)) == str(told.value)
    return str(told.value)


def programs(folder: Path) -> list[Path]:
    return sorted((folder / "machine").glob("*.so"))


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Ended; a zombie counts as there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# Made, and made once


def test_a_source_is_made_then_remembered_then_read_from_disk(untried: Path, temporary: Path):
    first = machine.made(SOURCE)
    assert first.library.answer() == 42
    assert first.origin == "made"
    assert first.seconds > 0
    again = machine.made(SOURCE)
    assert (again.origin, again.seconds) == ("memory", 0.0)
    assert again.library is first.library
    assert machine.begin(SOURCE).result(0).origin == "memory"
    machine._desk.cache_clear()
    kept_one = machine.begin(SOURCE).result(PATIENCE_S)
    assert (kept_one.origin, kept_one.seconds) == ("disk", 0.0)
    assert kept_one.library.answer() == 42
    assert (untried / "machine").stat().st_mode & 0o777 == 0o700
    assert os.listdir(temporary) == []


def test_two_sources_are_two_programs():
    assert machine.made(SOURCE).library.answer() == 42
    assert machine.made(SOURCE.replace("42", "43")).library.answer() == 43
    assert kept.count() == 2


def test_a_program_may_use_threads_vectors_and_mathematics():
    source = """
    #include <math.h>
    #include <pthread.h>
    typedef float lanes __attribute__((vector_size(32)));
    static void *run(void *at) {
        lanes two = {2, 2, 2, 2, 2, 2, 2, 2};
        *(double *)at = two[7] * cos(0.0);
        return 0;
    }
    double both(void) {
        pthread_t one;
        double got = 0;
        pthread_create(&one, 0, run, &got);
        pthread_join(one, 0);
        return got;
    }
    """
    both = machine.made(source).library.both
    both.restype = ctypes.c_double
    assert both() == 2.0


def test_a_library_that_is_forgotten_stays_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_REMEMBERED", 1)
    first = machine.made(SOURCE)
    machine.made(SOURCE.replace("42", "43"))
    assert first.library.answer() == 42
    assert machine.made(SOURCE).origin == "disk"


def test_a_source_that_is_under_way_is_not_compiled_twice(compiler: Callable[..., Path], tmp_path: Path):
    go, log = tmp_path / "go", tmp_path / "log"
    compiler(f"while [ ! -e {go} ]; do /bin/sleep 0.01; done\n{counted(log)}")
    under_way = machine.begin(SOURCE)
    assert machine.begin(SOURCE) is under_way
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(machine.made, SOURCE)
        go.touch()
        assert waiting.result(PATIENCE_S).library is under_way.result(PATIENCE_S).library
    assert len(log.read_text().splitlines()) == 1


def test_no_more_compile_at_once_than_there_are_processors(
    compiler: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "cores", lambda: 1)
    log = tmp_path / "log"
    compiler(f"echo begins >> {log}\n{REAL}\necho ends >> {log}")
    asked = [machine.begin(SOURCE.replace("42", str(number))) for number in range(3)]
    assert [each.result(PATIENCE_S).library.answer() for each in asked] == [0, 1, 2]
    assert log.read_text().split() == ["begins", "ends"] * 3


def test_nothing_is_raised_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch):
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        assert "no thread can be started" in str(machine.begin(SOURCE).exception(0))
    assert machine.made(SOURCE).library.answer() == 42


# Which compiler


def test_cc_comes_before_gcc_and_clang(compiler: Callable[..., Path]):
    for name in ("clang", "gcc", "cc"):
        path = compiler("exit 1", name)
        assert machine.compiler() == compilers.Compiler((str(path),), "fake 1.0", name)
        compilers._found.cache_clear()
    assert machine.unavailable() is None


def test_one_that_does_not_answer_is_passed_over(compiler: Callable[..., Path]):
    compiler("exit 1", "cc", version="")
    second = compiler("", "gcc")
    found = machine.compiler()
    assert found is not None
    assert found.command == (str(second),)


def test_the_one_that_is_named_comes_first_with_its_arguments(
    compiler: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = tmp_path / "log"
    compiler("exit 1")
    named = compiler(counted(log), "my compiler")
    monkeypatch.setenv("CC", f"'{named}' -DANSWER='6 * 7'")
    assert machine.made("int answer(void) { return ANSWER; }").library.answer() == 42
    found = machine.compiler()
    assert found is not None
    assert (found.command, found.origin) == ((str(named), "-DANSWER=6 * 7"), "$CC")


def test_a_relative_name_is_meant_from_here(
    compiler: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiler(f"exec {REAL}", "own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "bin/own")
    assert machine.made(SOURCE).library.answer() == 42


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("no-such-compiler", "no-such-compiler cannot be run (FileNotFoundError"),
        ("false", "false ended with code 1"),
        ('cc "-D', "$CC is 'cc \"-D', which is not a command (No closing quotation)"),
        ("echo -n", "--version made no library"),
    ],
)
def test_a_wrong_name_is_told(monkeypatch: pytest.MonkeyPatch, named: str, why: str):
    monkeypatch.setenv("CC", named)
    assert refusal().startswith(why)
    assert refusal().endswith(": set CC to a C compiler that works")


def test_an_empty_path_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    compilers._found.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why = "there is no C compiler (cc, gcc, clang): pip install 'carpool[cpu]', or install gcc or clang"
    assert (machine.compiler(), machine.unavailable(), refusal()) == (None, why, why)


ZIG = """
import json, os, sys
if "--version" in sys.argv:
    sys.exit(print("clang version 22.1.8"))
given = {name: os.environ[name] for name in ("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR")}
with open(LOG, "w") as log:
    json.dump([sys.argv[1:], os.getcwd(), given], log)
real = os.environ["REAL"]
os.execv(real, [real, *(word for word in sys.argv[2:] if not word.startswith("-mcpu="))])
"""


@pytest.mark.parametrize(("flags", "target"), [(V3, "x86_64_v3"), (V3 - {"fma"}, "x86_64")])
def test_zig_is_called_by_its_package_in_its_own_words(
    flags: frozenset[str],
    target: str,
    tmp_path: Path,
    untried: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__main__.py").write_text(ZIG.replace("LOG", repr(str(tmp_path / "log"))))
    (tmp_path / "ziglang" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    compilers._found.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    monkeypatch.setattr(machine, "processor", lambda: Processor("x86_64", "any", flags))
    assert machine.made(SOURCE).library.answer() == 42
    assert "ziglang" not in sys.modules
    found = machine.compiler()
    assert found is not None
    assert (found.version, found.origin) == ("clang version 22.1.8", "ziglang")
    words, folder, caches = json.loads((tmp_path / "log").read_text())
    assert words[0] == "cc"
    assert f"-mcpu={target}" in words
    assert not [
        word
        for word in words
        if word.startswith("-march") or word in targets.told(Processor("x86_64", "", V3))
    ]
    assert caches == {"ZIG_LOCAL_CACHE_DIR": folder, "ZIG_GLOBAL_CACHE_DIR": str(untried / "zig")}
    assert (untried / "zig").stat().st_mode & 0o777 == 0o700


# How it is called


def test_what_a_compiler_is_told(
    compiler: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path
):
    log = tmp_path / "log"
    compiler(f'pwd > {log}\necho "$LC_ALL $TMPDIR ${{SUNPRO_DEPENDENCIES-unset}}" >> {log}\n{counted(log)}')
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("SUNPRO_DEPENDENCIES", str(tmp_path / "dependencies"))
    machine.made(SOURCE)
    folder, surroundings, words = log.read_text().splitlines()
    assert Path(folder).parent == temporary
    assert surroundings == f"C {folder} unset"
    assert words.startswith("-O3 -fno-math-errno -fno-trapping-math ")
    assert words.endswith(" -shared -fPIC -pthread program.c -o program.so -lm")
    for unsafe in ("fast", "unsafe", "contract", "reciprocal", "associative", "native"):
        assert unsafe not in words


@pytest.mark.parametrize("lacks", ["avx2", "fma", "bmi2", "movbe"])
def test_what_the_processor_lacks_is_not_asked_for(lacks: str):
    gcc = compilers.Compiler(("gcc",), "", "gcc")
    full, less = (gcc.flags(Processor("x86_64", "", flags)) for flags in (V3, V3 - {lacks}))
    assert set(full) - set(less) == {f"-m{name}" for name in targets._V3.values()}
    assert "-march=x86-64" in less


@pytest.mark.parametrize(
    ("target", "wide"),
    [
        (ZEN_5, True),
        (replace(ZEN_5, kind="arm64"), False),
        (replace(ZEN_5, flags=ZEN_5.flags - {"avx512dq"}), False),
        (replace(ZEN_5, flags=ZEN_5.flags - {"fma"}), False),
        (replace(ZEN_5, family=25), False),
        (replace(ZEN_5, vendor="GenuineIntel", family=6), False),
        (Processor("x86_64"), False),
    ],
)
def test_wide_vectors_are_asked_for_where_programs_have_them(
    target: Processor, wide: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "processor", lambda: target)
    assert machine.vector_bytes() == (64 if wide else 32)
    gcc, zig = compilers.Compiler(("gcc",), "", "gcc"), compilers.Compiler(("zig", "cc"), "", "$CC")
    for by in (gcc, zig):
        assert any("avx512f" in word for word in by.flags(target)) == wide


def test_a_processor_is_known_by_its_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel name\t: AMD EPYC\nflags\t\t: fma\n\n"
    )
    monkeypatch.setattr(processor, "_LISTED", listed)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    assert processor.processor() == Processor("x86_64", "AMD EPYC", frozenset({"fma"}), "AuthenticAMD", 26)


def test_other_processors(monkeypatch: pytest.MonkeyPatch):
    gcc, zig = compilers.Compiler(("gcc",), "", "gcc"), compilers.Compiler(("zig", "cc"), "", "$CC")
    assert "-march=armv8-a" in gcc.flags(Processor("arm64"))
    assert "-mcpu=generic" in zig.flags(Processor("arm64"))
    for by in (gcc, zig):
        assert not [
            word for word in by.flags(Processor("riscv64", "", V3)) if word.startswith(("-m", "-mcpu"))
        ]


@pytest.mark.parametrize("text", [None, "", "processor : 0\n\n", "no colon\nflags\n"])
def test_a_system_that_tells_nothing_has_the_plainest_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
):
    listed = tmp_path / "cpuinfo"
    if text is not None:
        listed.write_text(text)
    monkeypatch.setattr(processor, "_LISTED", listed)
    monkeypatch.setattr(processor.platform, "machine", lambda: "AMD64")
    assert processor.processor() == Processor("x86_64", "", frozenset())
    assert not targets.has_v3(processor.processor())
    assert machine.made(SOURCE).library.answer() == 42


def test_another_processor_another_program(monkeypatch: pytest.MonkeyPatch, untried: Path):
    for flags in (frozenset(), frozenset({"sse2"})):
        monkeypatch.setattr(machine, "processor", lambda flags=flags: Processor("x86_64", "any", flags))
        machine._desk.cache_clear()
        assert machine.made(SOURCE).origin == "made"
    assert kept.count() == 2


# How it fails


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("exit 3", "fake 1.0 ended with code 3"),
        (
            "echo 'In function f:\nf:1: error: bad\nmore' >&2; exit 1",
            "fake 1.0 ended with code 1 (f:1: error: bad)",
        ),
        ("kill -9 $$", "fake 1.0 was ended by SIGKILL"),
        ("printf '\\033[31m\\377garbage' >&2; exit 1", "fake 1.0 ended with code 1 (\\x1b[31m\ufffdgarbage)"),
        ("echo garbage", "fake 1.0 made no library"),
        ("echo garbage > program.so", "what fake 1.0 made cannot be loaded ("),
        (": > program.so", "what fake 1.0 made cannot be loaded ("),
    ],
)
def test_a_failure_is_told_and_remembered_for_the_process_alone(
    compiler: Callable[..., Path], untried: Path, tmp_path: Path, temporary: Path, body: str, why: str
):
    log = tmp_path / "log"
    compiler(f"echo x >> {log}\n{body}")
    assert refusal().startswith(why)
    assert "set CC to a" in refusal()
    assert len(log.read_text().split()) == 1
    assert programs(untried) == []
    assert os.listdir(temporary) == []
    machine._desk.cache_clear()
    assert refusal().startswith(why)
    assert len(log.read_text().split()) == 2


def test_a_mistake_in_the_source_names_its_line():
    assert "program.c:1:" in refusal("int answer(void) { return 42 }")


def test_a_compiler_whose_version_is_garbage_still_compiles(compiler: Callable[..., Path]):
    compiler(
        f"exec {REAL}",
        version="case \"$*\" in *--version*) printf '\\033c\\377\\n\\n'; exit;; esac\n",
    )
    assert machine.made(SOURCE).library.answer() == 42
    found = machine.compiler()
    assert found is not None
    assert found.version == "\\x1bc\ufffd"


def test_a_compiler_that_hangs_is_ended_with_all_it_started(
    compiler: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path
):
    pids = tmp_path / "pids"

    class Begun(Child):
        """Its time is up once it has begun."""

        def wait(self, timeout_s: float | None = None) -> int | None:
            until(lambda: timeout_s is None or pids.exists() or self.poll() is not None)
            return super().wait(timeout_s)

    compiler(HANGS.replace("PIDS", str(pids)))
    monkeypatch.setattr(compilers, "Child", Begun)
    monkeypatch.setattr(compilers, "MOST_S", 0.01)
    assert refusal() == "fake 1.0 did not end within 0.01 s: set CC to a C compiler that works"
    for pid in pids.read_text().split():
        until(lambda pid=pid: is_gone(int(pid)))
    assert os.listdir(temporary) == []


def test_a_compiler_that_hangs_when_asked_who_it_is(
    compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    compiler("", version="exec /bin/sleep 1000\n")
    monkeypatch.setattr(compilers, "MOST_VERSION_S", 0.01)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal().startswith("cc did not end within 0.01 s: pip install 'carpool[cpu]'")
    assert machine.compiler() is None


def test_without_room_for_temporary_files_it_is_told(monkeypatch: pytest.MonkeyPatch):
    assert machine.compiler() is not None

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    assert "No space left on device): make room in the temporary folder, or set TMPDIR" in refusal()


# What is kept


def put(file: Path, data: bytes) -> None:
    """A new file in its place: what is loaded from the old one is not touched."""
    file.unlink()
    file.write_bytes(data)


@pytest.mark.parametrize("change", ["cut", "emptied", "changed", "exchanged"])
def test_a_file_that_is_not_what_was_kept_is_not_loaded_but_made_anew(
    change: str, untried: Path, monkeypatch: pytest.MonkeyPatch
):
    machine.made(SOURCE)
    (file,) = programs(untried)
    data = file.read_bytes()
    if change == "exchanged":
        machine.made("int answer(void) { return 13; }")
        other = next(each for each in programs(untried) if each != file)
        put(file, other.read_bytes())
        other.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        put(file, {"cut": data[:-1], "emptied": b"", "changed": flipped}[change])
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *given: pytest.fail(f"loaded {given}"))
        assert kept.load(file.name.partition("-")[0]) is None
    assert programs(untried) == []
    machine._desk.cache_clear()
    again = machine.made(SOURCE)
    assert (again.origin, again.library.answer()) == ("made", 42)
    assert [each.read_bytes() for each in programs(untried)] == [data]


def test_a_file_that_is_sound_but_cannot_be_loaded_is_made_anew(untried: Path):
    """As one that was kept under another system."""
    machine.made(SOURCE)
    (file,) = programs(untried)
    key = file.name.partition("-")[0]
    file.unlink()
    assert kept.keep(key, b"for another system") is not None
    machine._desk.cache_clear()
    assert machine.made(SOURCE).origin == "made"
    assert [each.name for each in programs(untried)] == [file.name]


@AS_ROOT
@pytest.mark.parametrize("what", ["file", "link"])
def test_a_file_or_link_of_another_user_is_not_loaded(what: str, untried: Path, tmp_path: Path):
    machine.made(SOURCE)
    (file,) = programs(untried)
    if what == "link":
        (tmp_path / "copy.so").write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(tmp_path / "copy.so")
    os.chown(file, 12345, 12345, follow_symlinks=False)
    machine._desk.cache_clear()
    assert machine.made(SOURCE).origin == "made"
    (own,) = programs(untried)
    assert not own.is_symlink()
    assert own.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_from_a_folder_that_others_may_write_nothing_is_loaded(untried: Path, mode: int):
    machine.made(SOURCE)
    (untried / "machine").chmod(mode)
    machine._desk.cache_clear()
    before = programs(untried)
    assert machine.made(SOURCE).origin == "made"
    assert machine.made(SOURCE.replace("42", "43")).library.answer() == 43
    assert programs(untried) == before
    assert kept.count() == 0


@AS_ROOT
@pytest.mark.parametrize("what", ["folder", "link"])
def test_from_a_folder_or_link_of_another_user_nothing_is_loaded(what: str, untried: Path, tmp_path: Path):
    machine.made(SOURCE)
    folder = untried / "machine"
    if what == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    os.chown(folder, 12345, 12345, follow_symlinks=False)
    machine._desk.cache_clear()
    assert machine.made(SOURCE).origin == "made"
    assert kept.count() == 0


def test_where_the_cache_is_another_users_it_is_compiled_without(
    untried: Path, monkeypatch: pytest.MonkeyPatch
):
    machine.made(SOURCE)
    before = programs(untried)
    theirs = os.geteuid() + 1
    monkeypatch.setattr(private.os, "geteuid", lambda: theirs)
    machine._desk.cache_clear()
    with pytest.warns(UserWarning, match="is not used: it belongs to another user"):
        assert machine.made(SOURCE).origin == "made"
    assert programs(untried) == before


def test_without_a_cache_folder_it_is_compiled_in_a_temporary_one(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
):
    monkeypatch.setattr(cache, "_place", lambda: None)
    with pytest.warns(UserWarning, match="there is no home folder"):
        answer = machine.made(SOURCE)
    assert (answer.origin, answer.library.answer()) == ("made", 42)
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("step", ["make_folder", "write_whole"])
def test_on_a_full_or_read_only_disk_it_is_compiled_without(
    number: int, step: str, untried: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path
):
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(kept, step, refuses)
    answer = machine.made(SOURCE)
    assert (answer.origin, answer.library.answer()) == ("made", 42)
    assert programs(untried) == []
    assert os.listdir(temporary) == []


def test_what_is_loaded_stays_when_its_file_is_replaced_or_removed(untried: Path):
    library = machine.made(SOURCE).library
    (file,) = programs(untried)
    private.write_whole(file, b"something else")
    assert library.answer() == 42
    file.unlink()
    assert library.answer() == 42


def test_where_nothing_may_run_from_the_cache_it_is_loaded_from_the_temporary_folder(
    untried: Path, monkeypatch: pytest.MonkeyPatch
):
    real = ctypes.CDLL

    def noexec(path: str) -> ctypes.CDLL:
        if path.startswith(str(untried)):
            raise OSError("failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(ctypes, "CDLL", noexec)
    assert machine.made(SOURCE).library.answer() == 42
    assert programs(untried) == []


@pytest.mark.parametrize(("files", "size"), [(2, 1 << 20), (1_000, 250)])
def test_what_was_used_longest_ago_goes(
    files: int, size: int, untried: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kept, "MOST_FILES", files)
    monkeypatch.setattr(kept, "MOST_BYTES", size)
    for age, key in [(1, "newest"), (3, "oldest"), (2, "old")]:
        file = kept.keep(key, b"x" * 100)
        assert file is not None
        os.utime(file, ns=(0, -age * 10**9))
    (untried / "machine" / ".writing-left").write_bytes(b"x")  # of a process that was killed
    os.utime(untried / "machine" / ".writing-left", ns=(0, -(10**12)))
    kept.trim()
    left = sorted(path.name.partition("-")[0] for path in (untried / "machine").iterdir())
    assert left == ["newest", "old"]


def test_a_program_that_is_used_again_outlives_newer_ones(untried: Path, monkeypatch: pytest.MonkeyPatch):
    machine.made(SOURCE)
    (used,) = programs(untried)
    machine.made(SOURCE.replace("42", "43"))
    for each in programs(untried):
        os.utime(each, ns=(0, 0 if each == used else 10**9))
    machine._desk.cache_clear()
    assert machine.made(SOURCE).origin == "disk"
    monkeypatch.setattr(kept, "MOST_FILES", 2)
    machine.made(SOURCE.replace("42", "44"))
    assert used in programs(untried)
    assert len(programs(untried)) == 2


def test_a_program_too_large_to_be_kept_is_used_all_the_same(untried: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept, "MOST_BYTES", 10)
    assert machine.made(SOURCE).library.answer() == 42
    assert programs(untried) == []


# Processes


ASK = f"""
from carpool import machine
answer = machine.made({SOURCE!r})
print(answer.origin, answer.library.answer())
"""


@contextlib.contextmanager
def running(program: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    source = str(Path(carpool.__file__).parents[1])
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source, **env}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_two_processes_make_the_same_at_once(
    compiler: Callable[..., Path], tmp_path: Path, untried: Path, temporary: Path
):
    """Each waits in its compiler until the other is there too."""
    meet = tmp_path / "meet"
    meet.mkdir()
    both = f": > {meet}/$$; while set -- {meet}/*; [ $# -lt 2 ]; do /bin/sleep 0.01; done"
    compiler(f"( {both} )\nexec {REAL}")
    with running(ASK) as one, running(ASK) as two:
        said = [process.communicate(timeout=PATIENCE_S) for process in (one, two)]
    assert said == [("made 42\n", "")] * 2
    assert machine.made(SOURCE).origin == "disk"
    assert len(programs(untried)) == 1
    assert os.listdir(untried / "machine") == [programs(untried)[0].name]
    assert os.listdir(temporary) == []


BEGUN = f"""
import pathlib, time
from carpool import machine
machine.begin({SOURCE!r})
while not pathlib.Path(PIDS).exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [(ASK, signal.SIGINT, -signal.SIGINT), (ASK, signal.SIGKILL, -signal.SIGKILL), (BEGUN, None, 0)],
    ids=["interrupted", "killed", "done"],
)
def test_a_compiler_does_not_outlive_us(
    program: str,
    number: int | None,
    code: int,
    compiler: Callable[..., Path],
    tmp_path: Path,
    temporary: Path,
):
    pids = tmp_path / "pids"
    compiler(HANGS.replace("PIDS", str(pids)))
    with running(program.replace("PIDS", repr(str(pids)))) as process:
        until(pids.exists)
        if number is not None:
            process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    for pid in pids.read_text().split():
        until(lambda pid=pid: is_gone(int(pid)))
    if number != signal.SIGKILL:
        assert os.listdir(temporary) == []


FORKS = f"""
import os, pathlib, sys
from carpool import machine
under_way = machine.begin({SOURCE!r})
go = pathlib.Path(os.environ["GO"])
child = os.fork()
if not child:
    go.touch()
    os._exit(machine.made({SOURCE!r}).library.answer())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), under_way.result().library.answer())
"""


def test_a_fork_does_not_wait_for_what_its_parent_compiles(compiler: Callable[..., Path], tmp_path: Path):
    go = tmp_path / "go"
    compiler(f"while [ ! -e {go} ]; do /bin/sleep 0.01; done\nexec {REAL}")
    with running(FORKS, GO=str(go), PYTHONWARNINGS="ignore") as process:
        assert process.communicate(timeout=PATIENCE_S) == ("42 42\n", "")
