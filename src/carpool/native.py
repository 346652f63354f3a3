"""A little C for a CPU, compiled by the machine's own compiler for this process alone: its file is removed once it is loaded."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-x", "c")
_MOST_S = 60.0


def compiled(source: str) -> ctypes.CDLL:
    """Its functions, which run without Python's lock. Raises OSError or SubprocessError where there is no compiler or it refuses."""
    with tempfile.TemporaryDirectory(prefix="carpool-", ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "native.so"
        subprocess.run(
            [*_compiler(), *_FLAGS, "-", "-o", str(library)],
            input=source.encode(),
            capture_output=True,
            check=True,
            timeout=_MOST_S,
        )
        return ctypes.CDLL(str(library))  # it stays loaded when its file is gone


def _compiler() -> list[str]:
    """`$CC` with its arguments, or what the machine calls its C compiler."""
    if named := shlex.split(os.environ.get("CC", "")):
        return named
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise FileNotFoundError("no C compiler: cc, gcc, clang")
    return [found]
