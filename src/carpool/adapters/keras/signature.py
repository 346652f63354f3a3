"""What a Keras job does, from the configs that its model, optimizer, loss and metrics are made of.

Two models of one signature differ in the numbers of their variables alone. That is known of models that are wholly made of Keras' own
parts; where one part is the user's own, its config may not say everything, and the model is taken for itself alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.utils.module_utils import tensorflow as lazy_tensorflow

from carpool.adapters.keras.fit import Fit
from carpool.marks import Identity
from carpool.planning.spec import Signature

_NO_BEHAVIOUR = frozenset({"name", "seed", "registered_name", "build_config", "shared_object_id"})


def signature(fit: Fit) -> Signature:
    """What the job does, entry by entry."""
    with _without_importing_tensorflow():
        return _signature(fit)


@contextmanager
def _without_importing_tensorflow() -> Iterator[None]:
    """Keras asks TensorFlow about every value that it serializes, and imports it for that: two seconds for nothing."""
    if "tensorflow" in sys.modules or lazy_tensorflow._available is not None:
        yield
        return
    lazy_tensorflow._available = False
    try:
        yield
    finally:
        lazy_tensorflow._available = None


def _signature(fit: Fit) -> Signature:
    model, options = fit.model, fit.options
    entries: list[tuple[str, Hashable]] = [
        ("backend", keras.backend.backend()),
        ("own fit", None if fit.own is None else Identity(model)),
        ("model", _model(model)),
        ("variables", tuple((tuple(v.shape), str(v.dtype), v.trainable) for v in model.variables)),
        ("outputs", tuple(model.output_names) if _is_many(model) else ()),
        ("optimizer", _optimizer(model.optimizer)),
        ("compile", _compiled(model)),
        ("data", fit.training.form if fit.training is not None else None),
        ("validation", _validation(fit)),
        ("each batch", fit.moments.each_batch is not None),
        ("validation_freq", str(options.validation_freq)),
    ]
    return tuple(entries)


def _is_many(model: Any) -> bool:
    return len(getattr(model, "output_names", None) or ()) > 1


def _validation(fit: Fit) -> Hashable:
    if fit.validation is None:
        return None
    return (fit.validation.form, fit.validation.length, fit.validation_batch)


def _model(model: Any) -> Hashable:
    if type(model) not in (keras.Sequential, keras.Model) and not _is_functional(model):
        return Identity(model)
    if any(not type(layer).__module__.startswith("keras.") for layer in model._flatten_layers()):
        return Identity(model)
    try:
        return _text(model.get_config())
    except Exception:
        return Identity(model)


def _is_functional(model: Any) -> bool:
    return type(model).__module__.startswith("keras.")


def _optimizer(optimizer: Any) -> Hashable:
    """Its config but for a learning rate that is a number: that one is a variable."""
    if not type(optimizer).__module__.startswith("keras."):
        return Identity(optimizer)
    config = optimizer.get_config()
    if isinstance(config.get("learning_rate"), int | float):
        config = {**config, "learning_rate": "a variable"}
    return type(optimizer).__name__, _text(config)


def _compiled(model: Any) -> Hashable:
    """Loss, metrics and the rest of `compile`'s arguments."""
    config = getattr(model, "_compile_config", None)
    held = dict(getattr(config, "config", {}) or {})
    held.pop("optimizer", None)
    try:
        return _text(keras.saving.serialize_keras_object(held))
    except Exception:
        return Identity(model)


def _text(config: Any) -> str:
    """A config as text in which names are numbered by their first appearance and what a seed or an initializer says is left out."""
    names: dict[str, str] = {}
    _collect(config, names)
    return json.dumps(_plain(config, names), sort_keys=True, default=repr)


def _collect(value: Any, names: dict[str, str]) -> None:
    if isinstance(value, dict):
        if isinstance(name := value.get("name"), str):
            names.setdefault(name, f"#{len(names)}")
        for part in value.values():
            _collect(part, names)
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, names)


def _plain(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _plain(part, names)
            for key, part in value.items()
            if key not in _NO_BEHAVIOUR and not str(key).endswith("initializer")
        }
    if isinstance(value, list | tuple):
        return [_plain(part, names) for part in value]
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, bool | int | float) or value is None:
        return value
    return repr(value)
