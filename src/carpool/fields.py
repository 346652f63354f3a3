"""Values of plain fields, read back from JSON that may say anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_type_hints

Value = TypeVar("Value")

_MOST = 1 << 53  # what every reader of JSON takes for a whole number


def value_of(kind: Callable[..., Value], found: object) -> Value | None:
    """A value of this kind, if what was found has its fields and each is of its type; None otherwise.

    Numbers are finite, counts are at least 1, and what is measured in seconds (`..._s`) is above 0.
    """
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        return None
    hints = get_type_hints(kind)
    if any(name not in hints or not _fits(name, value, hints[name]) for name, value in found.items()):
        return None
    try:
        return kind(**found)
    except (TypeError, ValueError):
        return None


def _fits(name: str, value: object, kind: Any) -> bool:
    if choices := get_args(kind):
        return any(_fits(name, value, choice) for choice in choices)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) < _MOST and math.isfinite(value) and (value > 0 or not name.endswith("_s"))
    if kind is int:
        return type(value) is int and 1 <= value < _MOST
    return type(value) is kind
