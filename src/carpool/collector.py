"""Python's collector of cyclic garbage, kept from looking through thousands of models again and again, all of which stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_runs = 0  # that set aside what they make
_aside = 0  # models, since everything was last looked through

_MANY = 256  # models, from which on looking through them takes longer than what it could find is worth
_MOST_ASIDE = 2048  # old when they come back: Python hardly looks through them of its own accord


@contextmanager
def set_aside(models: int) -> Iterator[None]:
    """Inside, with many models, whatever is there when the collector was put off is not looked through again, until the last such run has ended.

    So it looks for garbage first: for the young, and for all once there may be much, since a short call would wait longer than it trains. Whoever has frozen objects of their own is left alone: to thaw ours would be to thaw theirs.
    """
    global _runs, _aside
    with _lock:
        takes_part = models >= _MANY and (_runs > 0 or not gc.get_freeze_count())
        _runs += takes_part
        everything = takes_part and _aside + models > _MOST_ASIDE
        _aside = models if everything else _aside + models * takes_part
    try:
        if takes_part:
            gc.collect(2 if everything else 1)
        yield
    finally:
        with _lock:
            _runs -= takes_part
            if takes_part and not _runs:
                gc.unfreeze()


@contextmanager
def put_off() -> Iterator[None]:
    """Inside, no garbage is looked for."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        with _lock:
            if _runs:
                gc.freeze()
        if was_on:
            gc.enable()


def collect() -> None:
    """Looks through everything, now: memory is short."""
    with _lock:
        if _runs:
            gc.unfreeze()
    gc.collect()
