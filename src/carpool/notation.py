"""Python values as JSON, and back: what JSON has no word for is written with one of ours, and what has no notation as its `repr`."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carpool.arrays import Array

_DEEPEST = 64
_LONGEST_INTEGER_BITS = 10_000  # Python writes no longer ones in decimals
_MOST_NUMBERS = 10_000  # of an array that is written as text


def written(value: Any, arrays: dict[str, Array] | None = None, at: str = "", depth: int = 0) -> Any:
    """A value as JSON has it. Tuples, NaN, arrays and mappings with any keys are marked; a NumPy number is Python's.

    With `arrays`, an `Array` goes there, under the place where it was found.

    >>> written({"betas": (0.9, np.float32(0.5)), "rate": float("nan"), "act": len})
    {'betas': {'$tuple': [0.9, 0.5]}, 'rate': {'$float': 'nan'}, 'act': '<built-in function len>'}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum) or depth > _DEEPEST:
        return _shown(value)
    if isinstance(value, Array):
        return _placed(value, arrays, at)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() < _LONGEST_INTEGER_BITS else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}

    def inner(part: Any, name: Any) -> Any:
        return written(part, arrays, f"{at}.{name}" if at else str(name), depth + 1)

    if isinstance(value, Mapping):
        return _mapping(value, inner)
    if type(value) in (list, tuple):
        items = [inner(item, place) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.size <= _MOST_NUMBERS:
        return {"$array": [value.dtype.name, inner(value.tolist(), "")]}
    return _shown(value)


def read(value: Any, arrays: Mapping[str, Any] | None = None) -> Any:
    """The value that was written; of what was written as its `repr`, that text.

    >>> read(written((1, float("inf"), {2: "b"})))
    (1, inf, {2: 'b'})
    """
    if isinstance(value, list):
        return [read(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (word := next(iter(value))).startswith("$"):
        return {key: read(item, arrays) for key, item in value.items()}
    held = value[word]
    match word:
        case "$tuple":
            return tuple(read(held, arrays))
        case "$float":
            return float(held)
        case "$int":
            return int(held, 16)
        case "$items":
            return {_hashable(read(key, arrays)): read(item, arrays) for key, item in held}
        case "$array":
            return np.array(read(held[1]), held[0])
        case "$at":
            return (arrays or {})[held]
        case _:
            raise ValueError(f"{word!r} is no word of this notation")


def _mapping(value: Mapping[Any, Any], inner: Any) -> Any:
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {key: inner(item, key) for key, item in value.items()}
    return {"$items": [[inner(key, "key"), inner(item, key)] for key, item in value.items()]}


def _placed(value: Array, arrays: dict[str, Array] | None, at: str) -> Any:
    if arrays is None:
        return _shown(value)
    name = at if at not in arrays else f"{at} {len(arrays)}"
    arrays[name] = value
    return {"$at": name}


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, Sequence) and not isinstance(key, str) else key


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
