"""The parts of a process's memory: Linux lets it have 65,530, and XLA, which takes some hundred for each program on a CPU, crashes without.

So of the programs that are remembered the oldest go where half of that is reached, however few they are.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")
_MOST = Path("/proc/sys/vm/max_map_count")


def crowded() -> bool:
    """Whether half of them are taken; never where nobody can tell."""
    try:
        return 2 * _MAPS.read_bytes().count(b"\n") > int(_MOST.read_text())
    except (OSError, ValueError):
        return False


def thin(kept: OrderedDict[Any, Any], most: int) -> None:
    """Lets the oldest go: all but `most`, and half of those where it is crowded. The newest stays."""
    if crowded():
        most = min(most, max(1, len(kept) // 2))
    gone = len(kept) - most
    while len(kept) > most:
        kept.popitem(last=False)
    if gone > 1:
        gc.collect()
