"""Names of a module replaced for a while: for what torch does inside without asking any mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _Apart:
    """What stands for a name while some thread has replaced it: for each thread its own, for the others what it was."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.others: dict[int, list[Any]] = {}

    def _now(self) -> Any:
        own = self.others.get(threading.get_ident())
        return own[-1] if own else self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._now()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)


_changing = threading.Lock()


@contextmanager
def patched(module: ModuleType, **names: Any) -> Iterator[None]:
    """These names of the module, functions or classes, are others inside: for this thread, and what they were again outside.

    Others may train at the same time, or leave in another order than they came.
    """
    for name, value in names.items():
        _replace(module, name, value)
    try:
        yield
    finally:
        for name in names:
            _restore(module, name)


def _replace(module: ModuleType, name: str, value: Any) -> None:
    with _changing:
        found = getattr(module, name)
        if not isinstance(found, _Apart):
            found = _Apart(found)
            setattr(module, name, found)
        found.others.setdefault(threading.get_ident(), []).append(value)


def _restore(module: ModuleType, name: str) -> None:
    with _changing:
        found, me = getattr(module, name), threading.get_ident()
        found.others[me].pop()
        if not found.others[me]:
            del found.others[me]
        if not found.others:
            setattr(module, name, found.original)
