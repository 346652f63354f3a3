"""The host's heap, kept: what one step frees the next one takes again.

glibc hands large free blocks back to the system at once, and the next step pays page faults for them: 512 small networks on two cores
took twice as long for that. What is kept is given back when a run ends.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's words for them
_KEPT_BYTES = 1 << 30
_LARGEST_BYTES = 32 << 20  # of a block that comes from the heap at all: glibc accepts no more


@functools.cache
def keep() -> bool:
    """Until it is given back; whether it could be done. Whoever has said how glibc should allocate is left alone."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    change = _function("mallopt")
    return change is not None and bool(
        change(_MMAP_THRESHOLD, _LARGEST_BYTES) and change(_TRIM_THRESHOLD, _KEPT_BYTES)
    )


def give_back() -> None:
    """Hands what is free back to the system, if any of it was kept, and keeps no more than glibc itself might from now on."""
    if keep.cache_info().currsize and keep():
        change, trim = _function("mallopt"), _function("malloc_trim")
        if change is not None and trim is not None:
            change(_TRIM_THRESHOLD, 2 * _LARGEST_BYTES)
            trim(ctypes.c_size_t(0))
    keep.cache_clear()


def _function(name: str) -> Callable[..., Any] | None:
    """One of glibc's own; None with another allocator or another system."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):
        return None
