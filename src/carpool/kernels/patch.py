"""Names of a module replaced for a while: for what torch does inside without asking any mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def patched(module: ModuleType, **names: Any) -> Iterator[None]:
    """These names of the module are others inside, and what they were again outside."""
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
