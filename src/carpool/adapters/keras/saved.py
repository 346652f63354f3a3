"""A model's and its optimizer's variables under their paths, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from carpool.adapters.matching import matched, told_apart
from carpool.arrays import Array


def arrays_of(variables: Sequence[Any]) -> dict[str, Array]:
    values = (Array.of(keras.ops.convert_to_numpy(variable)) for variable in variables)
    return dict(zip(_names(variables), values, strict=True))


def write(variables: Sequence[Any], arrays: Mapping[str, Array]) -> None:
    """Raises ModelError where names or shapes are others."""
    names = _names(variables)
    shapes = {name: tuple(variable.shape) for name, variable in zip(names, variables, strict=True)}
    found = matched(shapes, arrays, numbered=True)
    for name, variable in zip(names, variables, strict=True):
        variable.assign(found[name].numpy())


def _names(variables: Sequence[Any]) -> list[str]:
    return told_apart(variable.path for variable in variables)
