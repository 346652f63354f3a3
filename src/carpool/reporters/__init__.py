"""Reporters: callables that take every event of a run. They show what happens and can change nothing.

A reporter that holds something open (a display, a file) has a `close()`, which the run calls at its end, whatever
the end is.
"""

from __future__ import annotations

from carpool.events import Emit


def default() -> list[Emit]:
    """What `reporters="auto"` means: progress on the console."""
    from carpool.reporters.console import Console

    return [Console()]
