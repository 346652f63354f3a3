"""Compiled programs kept on disk from run to run, in the folder `machine` of carpool's cache.

A file's name is the key of its program and a hash of key and content: one that was cut, or exchanged for
another, does not have its own name. It appears under that name whole, and is never written again: a process
that has loaded it keeps what it loaded, whoever removes the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from carpool import cache
from carpool.private import fault, foreign_link, make_folder, write_whole

MOST_BYTES = 64 << 20
MOST_FILES = 1_000
_FOLDER = "machine"
_ENDING = ".so"


def load(key: str) -> ctypes.CDLL | None:
    """The program with this key, if it is there as it was kept; what is not is removed."""
    for file in _files_of(key):
        try:
            sound = fault(file) is None and file.name == _name(key, file.read_bytes())
        except OSError:  # gone, or out of reach
            continue
        # Loading goes by name, after the check. Nobody but us may write into the folder, so what is loaded is
        # what was read.
        library = _loaded(file) if sound else None
        if library is not None:
            return library
        _remove(file)
    return None


def is_there(key: str) -> bool:
    """Whether there is a program with this key; it may still turn out to be none."""
    return bool(_files_of(key))


def keep(key: str, library: bytes) -> Path | None:
    """Writes a program; None where it could not."""
    place = cache.folder()
    if place is None:
        return None
    try:
        make_folder(place)
        make_folder(place / _FOLDER)
        if _ours() is None:
            return None
        file = place / _FOLDER / _name(key, library)
        write_whole(file, library)
    except OSError:
        return None
    return file


def trim() -> None:
    """Removes what was used longest ago, until the rest is few enough."""
    sizes = 0
    for number, kept in enumerate(sorted(_kept(), key=lambda kept: -kept.used_ns), 1):
        sizes += kept.size
        if number > MOST_FILES or sizes > MOST_BYTES:
            _remove(kept.file)


def forget(file: Path) -> None:
    """Removes a program that cannot be loaded."""
    _remove(file)


def count() -> int:
    """How many programs are kept."""
    return sum(kept.file.name.endswith(_ENDING) for kept in _kept())


@dataclass(frozen=True)
class _Kept:
    file: Path
    used_ns: int
    size: int


def _kept() -> Iterator[_Kept]:
    """Every file of the folder: also one that a process which was killed left half written."""
    folder = _ours()
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder) if folder is not None else ():
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(found.st_mode):
                    yield _Kept(Path(entry.path), found.st_mtime_ns, found.st_size)


def _files_of(key: str) -> list[Path]:
    """Two processes may have kept the same program, in other bytes."""
    folder = _ours()
    return sorted(folder.glob(f"{key}-*{_ENDING}")) if folder is not None else []


def _ours() -> Path | None:
    """The folder, if it is there and nobody else may write into it."""
    place = cache.folder()
    if place is None:
        return None
    folder = place / _FOLDER
    try:
        return folder if foreign_link(folder) is None and fault(folder) is None else None
    except OSError:
        return None


def _name(key: str, library: bytes) -> str:
    whole = hashlib.sha256(key.encode() + b"\n")
    whole.update(library)
    return f"{key}-{whole.hexdigest()}{_ENDING}"


def _loaded(file: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(file))
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # it was used now
    return library


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
