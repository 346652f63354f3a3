"""What a Keras job does, from the configs that its model, optimizer, loss and metrics are made of.

Two models of one signature differ in the numbers of their variables alone. That is known of models that are wholly made of Keras' own
parts and of plain functions; where one part is an object of the user's own class, its config may not say everything, and the model is
taken for itself alone.
"""

from __future__ import annotations

import functools
import json
import sys
import types
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.utils.module_utils import tensorflow as lazy_tensorflow

from carpool.adapters.keras.fit import Fit
from carpool.errors import failure
from carpool.fingerprint import digest, fingerprint
from carpool.marks import Identity
from carpool.planning.spec import Signature

_NO_BEHAVIOUR = frozenset(
    {"seed", "registered_name", "build_config", "build_input_shape", "compile_config", "shared_object_id"}
)
_NAMING = frozenset({"name", "keras_history", "input_layers", "output_layers"})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_OF_KERAS = ("keras", "builtins")
Entries = Iterator[tuple[str, Hashable]]


@dataclass(frozen=True)
class _OwnFit:
    """Equal for one model only, and shown as the reason."""

    reason: str
    model: Identity

    def __repr__(self) -> str:
        return f"by its own fit ({self.reason})"


class _OwnPart(Exception):
    """A config holds something of the user's own class."""


def signature(fit: Fit) -> Signature:
    """What the job does, entry by entry."""
    with _without_importing_tensorflow(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*lambda", UserWarning)  # nothing is saved here
        return tuple(_entries(fit))


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


def _entries(fit: Fit) -> Entries:
    model = fit.model
    yield "backend", keras.backend.backend()
    yield "training", "by programs" if fit.own is None else _OwnFit(fit.own, Identity(model))
    yield from _model(model)
    yield "variables", tuple((tuple(v.shape), str(v.dtype), v.trainable) for v in model.variables)
    yield "outputs", tuple(model.output_names) if _is_many(model) else ()
    yield from _optimizer(model)
    yield from _compiled(model)
    yield "batch size", fit.job.batch_size
    yield "data", fit.training.form if fit.training is not None else None
    yield "inputs", _input_names(fit)
    yield "validation", _validation(fit)
    yield "a callback at each batch", fit.moments.each_batch is not None
    yield "validation_freq", str(fit.options.validation_freq)


def _is_many(model: Any) -> bool:
    return len(getattr(model, "output_names", None) or ()) > 1


def _input_names(fit: Fit) -> Hashable:
    """Inputs by name, where the data is given by name: elsewhere a name says nothing."""
    if not isinstance(fit.given.x, Mapping):
        return None
    return tuple(str(tensor.name) for tensor in getattr(fit.model, "inputs", None) or ())


def _validation(fit: Fit) -> Hashable:
    if fit.validation is None:
        return None
    return (fit.validation.form, fit.validation.length, fit.validation_batch)


# The model


def _model(model: Any) -> Entries:
    if not _is_keras(model) or any(not _is_keras(layer) for layer in model._flatten_layers()):
        yield "model", Identity(model)
        return
    try:
        entries = [*_functions(model), *_numbers(model), *_flat("", _plain(model.get_config()))]
    except BaseException as error:
        failure(error)
        yield "model", Identity(model)
        return
    yield "model", type(model).__name__
    yield from entries


def _is_keras(thing: Any) -> bool:
    return type(thing).__module__.startswith("keras.")


def _functions(model: Any) -> Entries:
    """What layers hold of the user's own functions: a config says no more than their names."""
    for number, layer in enumerate(model._flatten_layers(include_self=False)):
        for name, value in vars(layer).items():
            if isinstance(value, _FUNCTIONS) and not _comes_from_keras(value):
                yield f"layer {number} ({type(layer).__name__}): {name}", fingerprint(value)


def _numbers(model: Any) -> Entries:
    """Arrays that layers hold outside of their variables, such as what Normalization was adapted to: a step has them in it."""
    for number, layer in enumerate(model._flatten_layers(include_self=False)):
        for name, value in vars(layer).items():
            if _is_array(value):
                held = np.ascontiguousarray(keras.ops.convert_to_numpy(value))
                label = f"layer {number} ({type(layer).__name__}): {name}, as it is held"
                yield label, (held.shape, digest(held))


def _is_array(value: Any) -> bool:
    if isinstance(value, keras.Variable | keras.KerasTensor):
        return False
    return isinstance(value, np.ndarray) or keras.ops.is_tensor(value)


def _comes_from_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.")


# Optimizer, loss and metrics


def _optimizer(model: Any) -> Entries:
    """Its config but for a learning rate that is a number: that one is a variable."""
    optimizer = model.optimizer
    if not _is_keras(optimizer):
        yield "optimizer", Identity(optimizer)
        return
    try:
        entries = list(_flat("optimizer", _rate_is_a_variable(_plain(optimizer.get_config()))))
    except _OwnPart:
        yield "optimizer", Identity(optimizer)
        return
    yield "optimizer", type(optimizer).__name__
    yield from entries
    decayed = getattr(optimizer, "_use_weight_decay", None)
    if decayed is not None and getattr(optimizer, "weight_decay", None):
        yield "optimizer: decays", tuple(decayed(variable) for variable in model.trainable_variables)


def _rate_is_a_variable(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {
        key: "a variable"
        if key == "learning_rate" and isinstance(part, int | float)
        else _rate_is_a_variable(part)
        for key, part in config.items()
    }


def _compiled(model: Any) -> Entries:
    """Loss, metrics and the rest of `compile`'s arguments."""
    held = dict(getattr(getattr(model, "_compile_config", None), "config", {}) or {})
    held.pop("optimizer", None)
    for word, value in sorted(held.items()):
        try:
            said = _said(value)
        except BaseException as error:
            failure(error)
            said = Identity(model)
        yield f"compile: {word}", said


def _said(value: Any) -> Hashable:
    """An argument of `compile` as it was given."""
    if isinstance(value, dict):
        return tuple((str(key), _said(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(_said(part) for part in value)
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if isinstance(value, _FUNCTIONS):
        return str(getattr(value, "__name__", value)) if _comes_from_keras(value) else fingerprint(value)
    if _is_keras(value):
        own = {k: f for k, f in vars(value).items() if isinstance(f, _FUNCTIONS) and not _comes_from_keras(f)}
        config = json.dumps(_plain(value.get_config()), sort_keys=True)
        return type(value).__name__, config, tuple((k, fingerprint(f)) for k, f in own.items())
    if isinstance(value, keras.Loss):
        held = {name: part for name, part in vars(value).items() if name != "name"}
        return fingerprint((type(value), held), _keras_part)
    return Identity(value)


def _keras_part(value: Any) -> Any:
    """A Keras object that a user's loss holds."""
    if isinstance(value, keras.DTypePolicy):
        return value.name
    return Identity(value) if _is_keras(value) else NotImplemented


# Configs


def _plain(config: Any) -> Any:
    """A config of plain values in which names are numbered by their first appearance; seeds and initializers are left out.

    Raises _OwnPart where an object of the user's own class is in it.
    """
    names: dict[str, str] = {}
    _collect(config, names)
    return _numbered(config, names)


def _collect(value: Any, names: dict[str, str]) -> None:
    if isinstance(value, dict) and _policy(value) is None:
        if isinstance(name := value.get("name"), str):
            names.setdefault(name, f"#{len(names)}")
        for part in value.values():
            _collect(part, names)
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, names)


def _policy(value: Mapping[str, Any]) -> str | None:
    """The name of a DTypePolicy, which says all of it."""
    if value.get("class_name") != "DTypePolicy":
        return None
    return str(value.get("config", {}).get("name"))


def _numbered(value: Any, names: Mapping[str, str], is_naming: bool = False) -> Any:
    if isinstance(value, dict):
        if (policy := _policy(value)) is not None:
            return policy
        if value.get("registered_name") and str(value.get("module")).partition(".")[0] not in _OF_KERAS:
            raise _OwnPart
        return {
            str(key): _numbered(part, names, is_naming or key in _NAMING)
            for key, part in value.items()
            if key not in _NO_BEHAVIOUR and not str(key).endswith("initializer")
        }
    if isinstance(value, list | tuple):
        return [_numbered(part, names, is_naming) for part in value]
    if isinstance(value, str) and is_naming:
        return names.get(value, value)
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if _is_keras(value):
        return _numbered(keras.saving.serialize_keras_object(value), names)
    return repr(value)


def _flat(label: str, config: Any) -> Entries:
    """A config's entries; those of a layer begin with its number and class."""
    if isinstance(config, dict):
        for key, part in sorted(config.items()):
            if key == "layers" and isinstance(part, list):
                for number, layer in enumerate(part):
                    yield from _layer(f"{label}: " if label else "", number, layer)
            else:
                yield from _flat(
                    f"{label}{'' if not label else ': ' if ':' not in label else '.'}{key}", part
                )
    else:
        yield label, json.dumps(config, sort_keys=True)


def _layer(before: str, number: int, layer: Any) -> Entries:
    kind = layer.get("class_name")
    yield f"{before}layer {number}", kind
    for key, part in sorted(layer.items()):
        if key == "config":
            yield from _flat(f"{before}layer {number} ({kind})", part)
        elif key not in ("class_name", "module"):
            yield f"{before}layer {number} ({kind}): {key}", json.dumps(part, sort_keys=True)
