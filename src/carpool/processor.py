"""The processors that this process runs on: how many there are, of which kind, and what they can."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_LISTED = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """One kind: `x86_64` or `arm64` or another.

    `flags` are Linux' names of what it can; none where the system does not tell. `vendor` and `family` are
    those of x86: a family's processors are made alike.
    """

    kind: str
    model: str = ""
    flags: frozenset[str] = frozenset()
    vendor: str = ""
    family: int = 0


def cores() -> int:
    """How many processors this process may use."""
    if hasattr(
        os, "sched_getaffinity"
    ):  # what this process may use, which is less than the machine in a container
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> Processor:
    """The first of this machine's."""
    named = platform.machine()
    kind = {"amd64": "x86_64", "aarch64": "arm64"}.get(named.lower(), named.lower())
    try:
        listed = first_listed(_LISTED.read_text(errors="replace"))
    except OSError:
        listed = {}
    flags = listed.get("flags") or listed.get("Features") or ""
    vendor, family = listed.get("vendor_id", ""), listed.get("cpu family", "")
    number = int(family) if family.isdecimal() else 0
    return Processor(kind, listed.get("model name", ""), frozenset(flags.split()), vendor, number)


def first_listed(cpuinfo: str) -> dict[str, str]:
    """What Linux says of the first processor.

    >>> first_listed("processor : 0\\nflags : fma avx2\\n\\nprocessor : 1\\nflags : fma\\n")
    {'processor': '0', 'flags': 'fma avx2'}
    """
    first = cpuinfo.strip().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
