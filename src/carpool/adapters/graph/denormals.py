"""Numbers too small for their type count as zero in TensorFlow's own threads; a thread that runs a step itself does the same while it does.

Without this a session stepped by its caller differs from others where such numbers come up: Adam's powers of beta after a thousand steps are some.
"""

from __future__ import annotations

import ctypes
import platform
from types import TracebackType
from typing import Any

import numpy as np

_BYTES = 32  # of C's fenv_t, on either machine
_SWITCHES = {"x86_64": (28, 0x8040), "aarch64": (0, 1 << 24)}
"""Where the word lies in fenv_t that says so, and its bits: of MXCSR, flush to zero and denormals are zero; of FPCR, flush to zero."""


class Flushed:
    """Inside, in this thread, such numbers are zero."""

    def __init__(self) -> None:
        self._held = (ctypes.c_uint8 * _BYTES)()

    def __enter__(self) -> None:
        assert _library is not None
        _library.fegetenv(self._held)
        changed = (ctypes.c_uint8 * _BYTES).from_buffer_copy(self._held)
        offset, bits = _SWITCHES[platform.machine()]
        word = ctypes.c_uint32.from_buffer(changed, offset)
        word.value |= bits
        _library.fesetenv(changed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert _library is not None
        _library.fesetenv(self._held)


def _found() -> Any:
    """C's library for it, which keeps Python's lock: the two calls are shorter than giving it away."""
    if platform.machine() not in _SWITCHES or platform.system() != "Linux":
        return None
    try:
        library = ctypes.PyDLL("libm.so.6")
        return library if library.fegetenv and library.fesetenv else None
    except (OSError, AttributeError):
        return None


_library = _found()


def can_flush() -> bool:
    """Whether this machine lets a thread say so; tried out, not guessed."""
    if _library is None:
        return False
    small = np.array([1e-38], np.float32)
    with Flushed():
        made = small * np.float32(0.01)
    return bool(made[0] == 0 and (small * np.float32(0.01))[0] != 0)
