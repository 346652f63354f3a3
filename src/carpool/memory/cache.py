"""How much of the processor's cache a computation has: the last level's, of as many of them as its threads reach."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def cache_bytes(threads: int) -> int:
    """Bytes of cache that so many threads share at most; 0 where the system does not say."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    sizes = dict(filter(None, (_last_level(_CPUS / f"cpu{cpu}" / "cache") for cpu in cpus)))
    return sum(sorted(sizes.values(), reverse=True)[:threads])


@cache  # a stack asks several times, and it takes a dozen files to tell
def _last_level(folder: Path) -> tuple[str, int] | None:
    """Which processors share the last level, and its size."""
    found: list[tuple[int, str, int]] = []
    for level in folder.glob("index*"):
        try:
            number, shared_by, size = (
                (level / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
            )
            found.append((int(number), shared_by, _bytes(size)))
        except (OSError, ValueError):
            continue
    return max(found)[1:] if found else None


def _bytes(size: str) -> int:
    """Linux' way to write a size.

    >>> _bytes("32768K"), _bytes("8M")
    (33554432, 8388608)
    """
    units = {"K": 10, "M": 20, "G": 30}
    return int(size[:-1]) << units[size[-1]] if size[-1:] in units else int(size)
