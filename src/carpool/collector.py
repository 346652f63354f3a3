"""Python's collector of cyclic garbage, kept from looking through thousands of models again and again, all of which stay."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_runs = 0  # that set aside what they make
_aside = 0  # models, since everything was last looked through, of which nobody said what they are
_watched: list[tuple[weakref.ref[Any], ...]] = []  # the others, each with what belongs to it

_MANY = 256  # models, from which on looking through them takes longer than what it could find is worth
_MOST_ASIDE = 2048  # old when they come back: Python hardly looks through them of its own accord


@contextmanager
def set_aside(models: int) -> Iterator[Callable[[Iterable[Iterable[Any]]], None]]:
    """Inside, with many models, whatever is there when the collector was put off is not looked through again, until the last such run has ended.

    So it looks for garbage first: for the young, and for all once there may be much, since a short call would wait longer than it trains.
    What is given may be told which objects each model is: those that are gone by themselves are not counted again. Whoever has frozen objects of their own is left alone: to thaw ours would be to thaw theirs.
    """
    global _runs, _aside
    with _lock:
        takes_part = models >= _MANY and (_runs > 0 or not gc.get_freeze_count())
        _runs += takes_part
        everything = takes_part and _aside + _num_there() + models > _MOST_ASIDE
        if everything:
            _aside = 0
            _watched.clear()
        _aside += models * takes_part
    try:
        if takes_part:
            gc.collect(2 if everything else 1)
        yield _watch if takes_part else lambda made: None
    finally:
        with _lock:
            _runs -= takes_part
            if takes_part and not _runs:
                gc.unfreeze()


def _num_there() -> int:
    """How many of the watched models are not wholly gone: somebody has them, or they are garbage in a cycle."""
    _watched[:] = [parts for parts in _watched if any(part() is not None for part in parts)]
    return len(_watched)


def _watch(made: Iterable[Iterable[Any]]) -> None:
    global _aside
    for parts in made:
        try:
            held = tuple(map(weakref.ref, parts))
        except TypeError:  # nothing can be told of a model that is a dict, say
            continue
        with _lock:
            _watched.append(held)
            _aside = max(0, _aside - 1)


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
