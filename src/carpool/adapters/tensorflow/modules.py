"""A module's variables under the paths that they have in it; Keras layers in it count too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from carpool.adapters.tensorflow.held import Held, is_mirrored, of_variables


def is_module(model: Any) -> bool:
    """Whether it is a tf.Module, and no model of Keras: those are compiled, and Keras' adapter trains them."""
    return isinstance(model, tf.Module) and not _is_keras(model, "Model")


def variables(model: tf.Module) -> tuple[Held, ...]:
    """Every variable once, under its first path."""
    seen: set[int] = set()
    named: list[tuple[str, Any]] = []
    for path, variable in _found(model):
        if id(variable) not in seen:
            seen.add(id(variable))
            named.append((path, variable))
    return of_variables(named)


def _found(model: Any) -> Iterator[tuple[str, Any]]:
    for path, thing in model._flatten(predicate=_is_wanted, with_path=True):
        where = ".".join(map(str, path))
        if isinstance(thing, tf.Variable) or is_mirrored(thing):
            yield where, thing
        else:
            for variable in thing.variables:
                yield f"{where}.{variable.path}", variable.value


def _is_wanted(thing: Any) -> bool:
    return isinstance(thing, tf.Variable) or is_mirrored(thing) or _is_keras(thing, "Layer")


def _is_keras(thing: Any, kind: str) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(thing, getattr(keras, kind, ()))
