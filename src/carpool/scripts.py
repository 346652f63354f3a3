"""Scripts to run side by side, as values: what the command line asks for, and what became of each."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import BuiltinImporter, PathFinder
from pathlib import Path

from carpool.errors import FileError, OptionError, printable, sentence
from carpool.memory.size import shown

BETWEEN = ":"
"""The word between two scripts on the command line."""
_LONGEST_BYTES = 120  # of a log's name; file systems take 255, and more comes behind it


@dataclass(frozen=True)
class Script:
    """A Python file, a module (`-m`) or a program, with its arguments.

    >>> Script("train", "train.py", ("--lr", "0.1")).command[1:]
    ('train.py', '--lr', '0.1')
    """

    name: str
    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_tf1: bool = False
    """Whether it was written for TensorFlow 1."""

    @property
    def command(self) -> tuple[str, ...]:
        """What to run: Python code with this Python, anything else as it is."""
        if self.is_tf1:
            named = ("-m", self.target) if self.is_module else (self.target,)
            return (sys.executable, "-m", "carpool.process.tf1", *named, *self.arguments)
        if self.is_module:
            return (sys.executable, "-m", self.target, *self.arguments)
        python = (sys.executable,) if self.target.endswith(".py") else ()
        return (*python, self.target, *self.arguments)

    @property
    def file_name(self) -> str:
        """The name as that of a file; a long one is cut, and a digest of the whole tells it from others.

        >>> Script("a[x=/y]", "a.py").file_name, Script("a" * 300, "a.py").file_name[100:]
        ('a[x=_y]', 'aaaaaaa-d309cd0c60e1')
        """
        plain = re.sub(r"[^\w.,=\[\]+-]", "_", self.name)
        if len(plain.encode()) <= _LONGEST_BYTES:
            return plain
        digest = hashlib.blake2b(self.name.encode(errors="surrogateescape"), digest_size=6).hexdigest()
        cut = plain.encode()[: _LONGEST_BYTES - len(digest) - 1].decode(errors="ignore")
        return f"{cut}-{digest}"


@dataclass(frozen=True)
class Ended:
    """What became of a script. `code` is negative where a signal ended it, None where it never started."""

    name: str
    code: int | None
    seconds: float = 0.0
    peak_bytes: int | None = None
    story: str = ""
    """Why we ended it, or could not start it."""
    lost: str = ""
    """Why its log ends before its output."""

    @property
    def is_completed(self) -> bool:
        return self.code == 0 and not self.story

    @property
    def outcome(self) -> str:
        outcome = self.story or ("completed" if self.code == 0 else "failed")
        return f"{outcome}, its log is not whole: {self.lost}" if self.lost else outcome


def parse(words: Sequence[str], axes: Sequence[str] = ()) -> tuple[Script, ...]:
    """The scripts of a command line, each once for every combination of the axes, the last axis fastest.

    >>> [script.name for script in parse(["a.py", "--fast", ":", "-m", "pack.b"], ["lr=0.1,0.01"])]
    ['a[lr=0.1]', 'a[lr=0.01]', 'pack.b[lr=0.1]', 'pack.b[lr=0.01]']
    """
    cells = _cells(axes)
    made = [_in_cell(script, cell) for script in map(_script, _split(words)) for cell in cells]
    return tuple(_told_apart(made))


def hint(words: Sequence[str]) -> str | None:
    """What was perhaps meant, where a script's argument is a script too; it may well be an argument.

    >>> hint(["a.py", "--lr", "0.1"]) is None
    True
    """
    meant: list[str] = []
    for number, part in enumerate(_split(words)):
        is_python = part[0].endswith(".py")
        found = [is_python and at > 0 and _is_script(word) for at, word in enumerate(part)]
        spaced = (
            [BETWEEN, word.strip(BETWEEN)] if new else [word] for word, new in zip(part, found, strict=True)
        )
        meant += [*([BETWEEN] if number else []), *itertools.chain.from_iterable(spaced)]
    return shlex.join(meant) if meant != list(words) else None


def _is_script(word: str) -> bool:
    named = word.strip(BETWEEN)
    return named.endswith(".py") and Path(named).is_file()


def for_tf1(scripts: Sequence[Script]) -> tuple[Script, ...]:
    """The same for programs of TensorFlow 1; only Python code can be given another TensorFlow.

    >>> for_tf1([Script("train", "train.py")])[0].command[1:]
    ('-m', 'carpool.process.tf1', 'train.py')
    """
    for script in scripts:
        if not (script.is_module or script.target.endswith(".py")):
            raise OptionError(
                sentence("Python files and modules with --tf1", script.target, "leave --tf1 out for it")
            )
    return tuple(replace(script, is_tf1=True) for script in scripts)


def check(scripts: Sequence[Script]) -> None:
    """Refuses a script that is not there, before anything runs."""
    for script in scripts:
        if fault := _fault(script):
            raise FileError(sentence(*fault))


def table(ended: Sequence[Ended]) -> str:
    """What became of each, as aligned text.

    >>> print(table([Ended("a", 0, 1.25, 3 << 20), Ended("b", -11, 0.5)]))
    script  outcome    code     seconds  peak memory
    a       completed  0        1.2      3 MiB
    b       failed     SIGSEGV  0.5      -
    """
    rows = [("script", "outcome", "code", "seconds", "peak memory"), *map(_row, ended)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _split(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for is_between, part in itertools.groupby(words, lambda word: word == BETWEEN):
        if not is_between:
            yield tuple(part)
    if not words or words[0] == BETWEEN or words[-1] == BETWEEN:
        raise OptionError(
            sentence(f"a script on each side of {BETWEEN!r}", repr(" ".join(words)), "name a script there")
        )


def _script(words: tuple[str, ...]) -> Script:
    if words[0] != "-m":
        target = words[0]
        name = Path(target).stem if target.endswith(".py") else Path(target).name
        return Script(name or target, target, words[1:])
    if len(words) < 2:
        raise OptionError(sentence("a module after -m", "nothing", "name one, such as -m package.train"))
    return Script(words[1], words[1], words[2:], is_module=True)


def _cells(axes: Sequence[str]) -> list[dict[str, str]]:
    values: dict[str, list[str]] = {}
    for axis in axes:
        name, equals, text = axis.partition("=")
        if not (name and equals and all(text.split(","))) or name.startswith("-") or name in values:
            wanted = "--grid NAME=VALUE,VALUE,... with each name once"
            raise OptionError(sentence(wanted, repr(axis), "write --grid lr=0.1,0.01, say"))
        values[name] = text.split(",")
    return [dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())]


def _in_cell(script: Script, cell: dict[str, str]) -> Script:
    if not cell:
        return script
    where = ",".join(f"{name}={value}" for name, value in cell.items())
    appended = [word for name, value in cell.items() for word in (f"--{name}", value)]
    return replace(script, name=f"{script.name}[{where}]", arguments=(*script.arguments, *appended))


def _told_apart(scripts: Sequence[Script]) -> Iterator[Script]:
    """Each with a name, and so a log, of its own: a second `train` is `train-2`."""
    taken: set[str] = set()
    for script in scripts:
        numbered = (replace(script, name=f"{script.name}-{number}") for number in itertools.count(2))
        free = next(each for each in itertools.chain([script], numbered) if each.file_name not in taken)
        taken.add(free.file_name)
        yield free


def _fault(script: Script) -> tuple[str, str, str] | None:
    """Expected, received and remedy, where a script is not there."""
    target = script.target
    if script.is_module:
        if not _is_module(target):
            return "a module that Python finds", f"-m {target}", "check its name, and run where it is found"
    elif target.endswith(".py"):
        if not Path(target).is_file():
            return "a Python file", f"{target}, which does not exist", "check the path"
    elif shutil.which(target) is None:
        remedy = f"chmod +x {target}" if Path(target).is_file() else "check its name or path"
        return "a Python file, -m MODULE or a program", f"{target}, which cannot be run", remedy
    return None


def _is_module(name: str) -> bool:
    """Whether Python would find it from here; runs none of its packages to see."""
    path: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    for end in range(1, name.count(".") + 2):
        full = ".".join(name.split(".")[:end])
        spec = PathFinder.find_spec(full, path) or (BuiltinImporter.find_spec(full) if end == 1 else None)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


def _row(ended: Ended) -> tuple[str, ...]:
    peak = "-" if ended.peak_bytes is None else shown(ended.peak_bytes)
    return printable(ended.name), printable(ended.outcome), _code(ended.code), f"{ended.seconds:.1f}", peak


def _code(code: int | None) -> str:
    if code is None:
        return "-"
    try:
        return str(code) if code >= 0 else signal.Signals(-code).name
    except ValueError:  # a real-time signal has a number only
        return f"signal {-code}"
