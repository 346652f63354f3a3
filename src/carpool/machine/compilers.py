"""The C compiler of this machine: which one it is, how it is called, and what it says when it fails.

It never outlives us (`process/child.py`), works in a folder of its own, and has a limited time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from carpool import cache
from carpool.errors import printable
from carpool.machine import targets
from carpool.private import fault, foreign_link, make_folder
from carpool.process.child import Child
from carpool.processor import Processor

MOST_S = 60.0  # a compile
MOST_VERSION_S = 10.0  # a question for the version
OPTIMISE = ("-O3", "-fno-math-errno", "-fno-trapping-math")
"""Nothing here changes the order of a sum, or what NaN and infinity do."""
_LIBRARY = ("-shared", "-fPIC", "-pthread")
_ZIG = ("-g0", "-fno-sanitize=undefined")  # without, it has checks in it, and names for debuggers
_INSTALL = "pip install 'carpool[cpu]', or install gcc or clang"
_ANOTHER = "set CC to a C compiler that works"
_NAMES = ("cc", "gcc", "clang")
_MOST_SAID = 200  # characters of what a compiler prints
_MOST_READ = 1 << 16

# These variables have files written, or flags changed, of which a program's name on disk does not tell.
_UNWANTED = ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "CCC_OVERRIDE_OPTIONS")


class NoMachineCode(Exception):
    """There is none of this source: its text is one sentence that says why, and what to do."""


@dataclass(frozen=True)
class Compiler:
    """A compiler that told its version. `origin` is `$CC`, the name that was found (`cc`), or `ziglang`."""

    command: tuple[str, ...]
    version: str
    origin: str

    @property
    def name(self) -> str:
        """As it calls itself."""
        return self.version or self.origin

    @property
    def is_zig(self) -> bool:
        """Zig's own: flags for processors are spelt in another way."""
        return _is_zig(self.command)

    def flags(self, target: Processor) -> tuple[str, ...]:
        """What is asked of it for programs that run on this processor."""
        words = (*targets.told_zig(target), *_ZIG) if self.is_zig else targets.told(target)
        return (*OPTIMISE, *words, *_LIBRARY)


def _is_zig(command: tuple[str, ...]) -> bool:
    return any(Path(word).name in ("zig", "ziglang") for word in command)


def find() -> Compiler | str:
    """`$CC` where it is set; otherwise the first of `cc`, `gcc`, `clang` and ziglang that answers.

    Where none does, why, and what to do. It is looked for once, and again where `$CC` or `$PATH` has changed.
    """
    return _found(os.environ.get("CC", ""), os.environ.get("PATH"), os.getpid())


@functools.lru_cache(maxsize=8)
def _found(named: str, path: str | None, process: int) -> Compiler | str:
    try:
        own = _absolute(shlex.split(named))
    except ValueError as error:
        return f"$CC is {printable(named)!r}, which is not a command ({error}): {_ANOTHER}"
    faults: list[str] = []
    for command, origin in [(own, "$CC")] if own else _candidates():
        answer = _asked(command, origin)
        if isinstance(answer, Compiler):
            return answer
        faults.append(answer)
    if not faults:
        return f"there is no C compiler ({', '.join(_NAMES)}): {_INSTALL}"
    return f"{'; '.join(faults)}: {_ANOTHER if own else _INSTALL}"


def _absolute(words: list[str]) -> tuple[str, ...]:
    """The same command in any folder."""
    if words and os.sep in words[0]:
        return (os.path.abspath(words[0]), *words[1:])
    return tuple(words)


def _candidates() -> Iterator[tuple[tuple[str, ...], str]]:
    for name in _NAMES:
        if (path := shutil.which(name)) is not None:
            yield (os.path.abspath(path),), name
    if importlib.util.find_spec("ziglang") is not None:  # found, not imported
        yield (sys.executable, "-m", "ziglang", "cc"), "ziglang"


def _asked(command: tuple[str, ...], origin: str) -> Compiler | str:
    name = printable(shlex.join(command)) if origin == "$CC" else origin
    try:
        with tempfile.TemporaryDirectory(prefix="carpool-", ignore_cleanup_errors=True) as folder:
            said = _run((*command, "--version"), Path(folder), name, MOST_VERSION_S)
    except (NoMachineCode, OSError) as error:
        return str(error)
    if origin == "ziglang":
        with contextlib.suppress(metadata.PackageNotFoundError):
            said = f"ziglang {metadata.version('ziglang')}, {said}"
    return Compiler(command, said, origin)


def compile_in(folder: Path, source: str, by: Compiler, flags: tuple[str, ...]) -> Path:
    """The library of a source, in this folder, which is ours alone. Raises NoMachineCode and OSError."""
    text, library = folder / "program.c", folder / "program.so"
    text.write_text(source, encoding="utf-8")
    command = (*by.command, *flags, text.name, "-o", library.name, "-lm")
    try:
        _run(command, folder, by.name, MOST_S)
    except NoMachineCode as error:
        raise NoMachineCode(f"{error}: {_ANOTHER}") from None
    if not library.is_file():
        raise NoMachineCode(f"{by.name} made no library: {_ANOTHER}")
    return library


def unloadable(by: Compiler, error: OSError) -> NoMachineCode:
    """What a compiler made is no library for this process."""
    why = f"what {by.name} made cannot be loaded ({_short(str(error))})"
    elsewhere = "CARPOOL_CACHE to a folder from which programs may run"
    return NoMachineCode(f"{why}: set CC to a compiler for this machine, or {elsewhere}")


def _environment(folder: Path, command: tuple[str, ...]) -> Mapping[str, str]:
    """Messages in English, and everything temporary where it goes with the folder."""
    kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    env = {**kept, "LC_ALL": "C", "TMPDIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder)}
    if _is_zig(command):  # it makes its own C library at first, which takes seconds and 50 MB
        env.setdefault("ZIG_GLOBAL_CACHE_DIR", str(_zig_folder() or folder))
    return env


def _zig_folder() -> Path | None:
    """In carpool's cache: what lies there is linked into programs, so it must be ours alone."""
    place = cache.folder()
    if place is None:
        return None
    own = place / "zig"
    try:
        make_folder(place)
        make_folder(own)
        return own if foreign_link(own) is None and fault(own) is None else None
    except OSError:
        return None


def _run(command: tuple[str, ...], folder: Path, name: str, limit_s: float) -> str:
    """The first line that a command prints. Raises NoMachineCode where it fails."""
    env = _environment(folder, command)
    with open(folder / "said", "w+b") as said, open(folder / "told", "w+b") as told:
        with _running(Child(command, env=env, cwd=folder, stdout=said, stderr=told)) as child:
            code, error = child.wait(limit_s), child.error
        if code is None:
            raise NoMachineCode(f"{name} did not end within {limit_s:g} s")
        if error is not None:
            raise NoMachineCode(f"{name} cannot be run ({_short(error)})")
        if code:
            why = _complaint(_read(told))
            raise NoMachineCode(f"{name} {_ended(code)}{f' ({why})' if why else ''}")
        return _short(next(iter(_lines(_read(said))), ""))


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_READ).decode(errors="replace")


_children: dict[Child, int] = {}
"""What runs now, and the process whose child it is: after a fork they are still their parent's."""


@contextlib.contextmanager
def _running(child: Child) -> Iterator[Child]:
    _children[child] = os.getpid()
    try:
        with child:
            yield child
    finally:
        del _children[child]


def kill_all() -> None:
    """Ends every compiler that this process runs."""
    for child, owner in list(_children.items()):
        if owner == os.getpid():
            child.kill()


def _ended(code: int) -> str:
    """How a command ended.

    >>> _ended(1), _ended(-9)
    ('ended with code 1', 'was ended by SIGKILL')
    """
    if code > 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _complaint(told: str) -> str:
    """The first line that names an error; otherwise the first.

    >>> _complaint("a.c: In function 'f':\\na.c:1:2: error: no such thing\\n")
    'a.c:1:2: error: no such thing'
    """
    lines = _lines(told)
    return _short(next((line for line in lines if "error" in line), lines[0] if lines else ""))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _short(text: str) -> str:
    return printable(text)[:_MOST_SAID]
