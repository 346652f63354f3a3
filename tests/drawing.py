"""Things that draw from the process's generators at the same time, for certain and without a clock."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from carpool import ambient
from patience import PATIENCE_S


def until(happened: Callable[[], bool]) -> None:
    """Waits until it has happened, or until somebody waits for us to get out of the generators' way."""
    end = time.monotonic() + PATIENCE_S
    while not happened() and not ambient._turns._asked:
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0)


class Source:
    """Batches whose making draws, read ahead without end until somebody has been made beside it."""

    def __init__(self, batch: Any, draw: Callable[[], Any]) -> None:
        self._batch, self._draw = batch, draw
        self._count, self._ended = 0, threading.Event()

    def __iter__(self) -> Iterator[Any]:
        while not self._ended.is_set():
            self._draw()
            self._count += 1
            yield self._batch

    def beside(self, make: Callable[[], Any]) -> Any:
        """What is made while it draws."""
        seen = self._count
        until(lambda: self._count > seen)
        made = make()
        self._ended.set()
        return made


class Meeting:
    """Where two threads are at the same time, once, unless one is kept out until the other is through."""

    def __init__(self) -> None:
        self._came: set[int] = set()

    def meet(self) -> None:
        self._came.add(threading.get_ident())
        until(lambda: len(self._came) == 2)


def at_once(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as threads:
        return [ended.result(PATIENCE_S) for ended in [threads.submit(work) for work in works]]


def own_generators() -> tuple[Any, ...]:
    """What Python's and NumPy's are."""
    kind, words, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(words).tobytes(), rest
