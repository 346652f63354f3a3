"""Who has something to read, however many descriptors this process has open: `select.select` takes none above 1,023."""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Source(Protocol):
    """Whatever has a descriptor."""

    def fileno(self) -> int: ...


Some = TypeVar("Some", bound=Source)


def ready(sources: Sequence[Some], timeout_s: float | None) -> list[Some]:
    """Those that can be read without waiting, their ends included; waits for the first one, None for ever."""
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    found = {number for number, _ in poll.poll(None if timeout_s is None else math.ceil(1e3 * timeout_s))}
    return [source for source in sources if source.fileno() in found]
