"""`fit`: several compiled Keras models fitted together, with the arguments of `model.fit`; `each` where these differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carpool.errors import DataError, JobError, OptionError, sentence
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


@dataclass(frozen=True, eq=False)
class Each:
    """A value for each model, by name."""

    values: Mapping[str, Any]


def each(**values: Any) -> Each:
    """A value for each model: `carpool.fit(models, x=carpool.each(a=xa, b=xb), ...)`.

    >>> each(a=1, b=2).values["b"]
    2
    """
    return Each(values)


def fit(
    models: Mapping[str, Any] | Sequence[Any],
    x: Any = None,
    y: Any = None,
    **arguments: Any,
) -> Results:
    """Fits compiled Keras models together; each ends as `model.fit(...)` would have left it.

    `models` is a dict of them by name, or a list, whose names are the models' positions as text. Every argument is one of `model.fit`'s,
    for all models, or `carpool.each(...)` with a value for each; arguments of `carpool.train` (device, memory, reporters ...)
    are for the run. The models hold their trained weights, optimizer state and `history` afterwards, and `result.history` is
    what `fit` would have returned. With `shuffle` the order is `carpool.batch_order` of `seed`.
    """
    named = _named(models)
    run = {key: arguments.pop(key) for key in _RUN if key in arguments}
    for key, value in {"x": x, "y": y, **arguments}.items():
        _check(key, value, named)
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


def _check(key: str, value: Any, named: Mapping[str, Any]) -> None:
    if not isinstance(value, Each):
        return
    stray = next((name for name in value.values if name not in named), None)
    if stray is not None:
        raise JobError(
            sentence(
                f"{key}=carpool.each(...) with names out of {', '.join(named)}", repr(stray), "rename it"
            )
        )
    missing = next((name for name in named if name not in value.values), None)
    if missing is not None:
        raise JobError(
            sentence(
                f"{key}=carpool.each(...) with a value for every model", f"none for {missing!r}", "add it"
            )
        )


def _of(value: Any, name: str) -> Any:
    return value.values[name] if isinstance(value, Each) else value


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
