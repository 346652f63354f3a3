"""A module's and an optimizer's variables under their names, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.adapters.matching import matched, told_apart
from carpool.adapters.tensorflow.held import Held, of_variables
from carpool.adapters.tensorflow.optimizer import is_keras, slots
from carpool.arrays import Array


def arrays_of(variables: Sequence[Held]) -> dict[str, Array]:
    names = told_apart(held.name for held in variables)
    return {name: Array.of(held.read().numpy()) for name, held in zip(names, variables, strict=True)}


def write(variables: Sequence[Held], arrays: Mapping[str, Array]) -> None:
    """Raises ModelError where names or shapes are others."""
    names = told_apart(held.name for held in variables)
    shapes = {name: tuple(held.read().shape.as_list()) for name, held in zip(names, variables, strict=True)}
    found = matched(shapes, arrays, numbered=True)
    for name, held in zip(names, variables, strict=True):
        held.write(found[name].numpy())


def state_variables(optimizer: Any) -> tuple[Held, ...]:
    """What it keeps: Keras' by place, those of TensorFlow's own by name."""
    if is_keras(optimizer):
        return slots(optimizer)
    held = getattr(optimizer, "variables", ())
    variables: Any = held() if callable(held) else held
    return of_variables((one.name, one) for one in variables)
