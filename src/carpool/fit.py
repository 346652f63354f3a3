"""`fit`: several compiled Keras models fitted together, with the arguments of `model.fit`; `each` where these differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from carpool import adapters
from carpool.errors import DataError, JobError, ModelError, OptionError, meant, sentence
from carpool.job import Job
from carpool.result import Results
from carpool.train import train

_FIELDS = (
    "batch_size",
    "epochs",
    "shuffle",
    "validation_data",
    "callbacks",
    "seed",
    "index",
    "priority",
    "budget",
)
_RUN = ("device", "memory", "strategy", "verify", "on_error", "reporters", "compile")


_DATA = ("x", "y", "sample_weight", "validation_data")
"""Arguments that a list of models may have a list of, one for each."""


@dataclass(frozen=True, eq=False)
class Each:
    """A value for each model: by name, or in the models' order."""

    values: Mapping[str, Any] | tuple[Any, ...]


def each(*given: Any, **named: Any) -> Each:
    """A value for each model: `carpool.fit(models, x=carpool.each(a=xa, b=xb), ...)`.

    Values without names are for the models in their order; one dict is by name.

    >>> each(a=1, b=2).values["b"], each({"a": 1, "b": 2}).values["b"], each(1, 2).values
    (2, 2, (1, 2))
    """
    if not given and not named:
        raise OptionError(sentence("a value for each model", "none", "pass carpool.each(a=..., b=...)"))
    if given and named:
        raise OptionError(
            sentence("values by name, or values in order", "both", "name all of them, or none of them")
        )
    if len(given) == 1 and isinstance(given[0], Mapping):
        return Each({str(name): value for name, value in given[0].items()})
    return Each(given or named)


def fit(
    models: Mapping[str, Any] | Sequence[Any],
    x: Any = None,
    y: Any = None,
    **arguments: Any,
) -> Results:
    """Fits compiled Keras models together; each ends as `model.fit(...)` would have left it.

    `models` is a dict of them by name, or a list, whose names are the models' positions as text. Every argument is one of `model.fit`'s,
    for all models, or `carpool.each(...)` with a value for each. Beside a dict of models a dict by their names has a value for each; beside a list of models
    that take one array a list as long of data has. Arguments of `carpool.train` (device, memory, reporters ...) are for the run. The models hold their trained weights, optimizer state and `history` afterwards, and `result.history` is
    what `fit` would have returned. With `shuffle` the order is `carpool.batch_order` of `seed`.
    """
    named = _named(models)
    for name, model in named.items():
        _check_model(name, model)
    run = {key: arguments.pop(key) for key in _RUN if key in arguments}
    given = {
        key: _checked(key, _apart(key, value, models, named), named)
        for key, value in {"x": x, "y": y, **arguments}.items()
    }
    x, y, arguments = given.pop("x"), given.pop("y"), given
    jobs = [
        _job(name, model, x, y, {key: _of(value, name) for key, value in arguments.items()})
        for name, model in named.items()
    ]
    for key, value in run.items():
        if isinstance(value, Each):
            raise OptionError(sentence(f"one {key} for the run", "carpool.each(...)", "pass one value"))
    return train(jobs, **run)


def _named(models: Any) -> dict[str, Any]:
    if isinstance(models, Mapping):
        named = {str(name): model for name, model in models.items()}
    elif isinstance(models, Sequence) and not isinstance(models, str):
        named = {str(position): model for position, model in enumerate(models)}
    else:
        raise JobError(
            sentence("a dict or a list of compiled models", type(models).__name__, "pass {'a': model}")
        )
    if not named:
        raise JobError(sentence("at least one model", "none", "pass {'a': model}"))
    return named


def _check_model(name: str, model: Any) -> None:
    """A model of another framework, or what is none; a function or a name makes one later."""
    if isinstance(model, str):
        return
    try:
        kind = adapters.claiming(model).name
    except ModelError:
        if callable(model):
            return
        kind = ""
    if kind != "keras":
        remedy = "train others by carpool.train([carpool.Job(model, (x, y), loss=..., optimizer=...)])"
        said = sentence(
            "a compiled Keras model", f"{type(model).__name__}{f' of {kind}' if kind else ''}", remedy
        )
        raise ModelError(f"Job {name!r}: {said}")


def _apart(key: str, value: Any, models: Any, named: Mapping[str, Any]) -> Any:
    """A value for each model, where the argument has the models' own form and nothing else can be meant by it."""
    if isinstance(models, Mapping) and isinstance(value, Mapping) and set(value) == set(models):
        is_ones = key in ("x", "y") and any(set(value) <= _names_of(model, key) for model in named.values())
        return value if is_ones else each(value)
    if (
        isinstance(models, Mapping)
        or key not in _DATA
        or not isinstance(value, list)
        or len(value) != len(named)
    ):
        return value
    if key == "validation_data":
        return each(*value) if all(isinstance(one, tuple) for one in value) else value
    word = "y" if key == "sample_weight" else key
    return each(*value) if all(_takes_one(model, word) for model in named.values()) else value


def _takes_one(model: Any, key: str) -> bool:
    """Whether it is known to take one array as x, or as y."""
    if isinstance(model, str) or not adapters.has_weights(model):
        return False
    return bool(import_module("carpool.adapters.keras.nests").takes_one(model, key))


def _names_of(model: Any, key: str) -> set[str]:
    """The names of a model's inputs, or of its outputs."""
    if isinstance(model, str) or not adapters.has_weights(model):
        return set()
    return import_module("carpool.adapters.keras.nests").names_of(model, key)


def _checked(key: str, value: Any, named: Mapping[str, Any]) -> Any:
    """The value, with names where it is for each model."""
    if not isinstance(value, Each):
        return value
    if isinstance(value.values, tuple):
        if len(value.values) != len(named):
            expected = f"{key}=carpool.each(...) with {len(named)} values, one for each model"
            raise JobError(sentence(expected, str(len(value.values)), "pass one for each, in their order"))
        return Each(dict(zip(named, value.values, strict=True)))
    stray = next((name for name in value.values if name not in named), None)
    if stray is not None:
        expected = f"{key}=carpool.each(...) with names out of {', '.join(named)}"
        raise JobError(sentence(expected, repr(stray), meant(stray, named) or "rename it"))
    missing = next((name for name in named if name not in value.values), None)
    if missing is not None:
        expected = f"{key}=carpool.each(...) with a value for every model"
        raise JobError(sentence(expected, f"none for {missing!r}", "add it"))
    return value


def _of(value: Any, name: str) -> Any:
    return value.values[name] if isinstance(value, Each) and isinstance(value.values, Mapping) else value


def _job(name: str, model: Any, x: Any, y: Any, arguments: dict[str, Any]) -> Job:
    x, y = _of(x, name), _of(y, name)
    if x is None:
        raise DataError(f"Job {name!r}: " + sentence("data", "x=None", "pass x"))
    fields = {key: arguments.pop(key) for key in _FIELDS if key in arguments}
    fields = {key: value for key, value in fields.items() if value is not None}
    if "callbacks" in fields and not isinstance(fields["callbacks"], list | tuple):
        fields["callbacks"] = [fields["callbacks"]]
    data = (x,) if y is None else (x, y)
    return Job(model, data, name=name, fit=arguments, **fields)
