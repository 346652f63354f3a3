"""Folders that nobody but this user may write into, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

_ROOT = 0


def make_folder(path: Path) -> None:
    """Makes a folder for this user alone where there is none, and those above it as usual. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def fault(path: Path, writable: int = stat.S_IWGRP | stat.S_IWOTH) -> str | None:
    """Who else may change what this folder holds; None where nobody may. Raises OSError where it is not there.

    `writable` are the bits of its mode that must not be set.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fault(Path(folder))
    """
    if path.is_symlink() and (theirs := foreign_link(path)):
        return theirs
    found = path.stat()
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others may write into it" if found.st_mode & writable else None


def foreign_link(path: Path) -> str | None:
    """The link of another user on the way to this path; whoever owns it may lead us anywhere. None where there is none."""
    for part in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            found = part.lstat()
            if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), _ROOT):
                return f"{part} is a link of another user"
    return None


def write_whole(path: Path, data: bytes) -> None:
    """Replaces the file, or leaves it as it was: no part of it is ever seen, or stays. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def create(path: Path) -> BinaryIO:
    """Opens a new file, unbuffered. A file or link of that name goes; nothing is written through it. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "wb", buffering=0)
