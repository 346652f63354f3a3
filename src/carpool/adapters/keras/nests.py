"""What a Keras model takes: one array or several, and their names, as far as it says."""

from __future__ import annotations

from typing import Any

import keras


def takes_one(model: Any, key: str) -> bool:
    """Whether it is known to take one array as "x", or as "y"."""
    if isinstance(model, keras.Sequential):
        return True
    found = said(model, key)
    return len(found) == 1


def names_of(model: Any, key: str) -> set[str]:
    """The names of its inputs, or those of its outputs."""
    listed = getattr(model, "input_names" if key == "x" else "output_names", None)
    return {str(name) for name in listed or ()} | {one.name for one in said(model, key)}


def said(model: Any, key: str) -> list[Any]:
    """Its inputs, or its outputs; none where it does not say before it is called."""
    try:
        return list((model.inputs if key == "x" else model.outputs) or ())
    except (AttributeError, ValueError):
        return []
