"""Whether processes are gone, and what they may open: for tests of what starts some. From /proc, so on Linux only."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


def children() -> set[str]:
    """The processes that we started and that still run."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def gone(pid: int | None, within_s: float = 60.0) -> bool:
    """Whether a process is gone, or a zombie that somebody else has to bury, within the time."""
    assert pid is not None, "it never ran"
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def many_descriptors() -> None:
    """Lets this process open as many of them as it may: more than `select` takes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def may_open(number: int) -> bool:
    """Whether a process may open so many descriptors, once it has asked for it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most == resource.RLIM_INFINITY or most >= number
