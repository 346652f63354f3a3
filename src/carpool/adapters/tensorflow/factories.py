"""Whether a job's factory makes a TensorFlow module: told by what the job names, before anything is called. Imports no framework."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from carpool.job import Job


def makes_modules(job: Job) -> bool:
    """Whether the job's model, optimizer, data or functions are TensorFlow's, or speak of it."""
    tensorflow = sys.modules.get("tensorflow")
    if not hasattr(tensorflow, "Module"):
        return False
    if _root(type(job.optimizer)) in ("tensorflow", "keras") or any(map(_is_ours, _leaves(job.data))):
        return True
    return any(_speaks(thing) for thing in (job.model, job.optimizer, job.step, job.loss))


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict):
        data = tuple(data.values())
    if isinstance(data, tuple | list):
        for part in data[:8]:
            yield from _leaves(part)
    else:
        yield data


def _speaks(thing: Any) -> bool:
    """Whether it is TensorFlow's, or a function that names something of it."""
    if isinstance(thing, functools.partial):
        return _speaks(thing.func) or any(map(_is_ours, thing.args))
    if _is_ours(thing):
        return True
    function: Any = inspect.unwrap(getattr(thing, "__func__", thing)) if callable(thing) else None
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    names = {name for one in _codes(code) for name in one.co_names}
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return any(map(_is_ours, (*known, *cells)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_ours(thing: Any) -> bool:
    """TensorFlow itself, a class of modules or of optimizers, or an object that TensorFlow made."""
    if isinstance(thing, ModuleType):
        return thing.__name__.partition(".")[0] == "tensorflow"
    if isinstance(thing, type):
        return issubclass(thing, sys.modules["tensorflow"].Module) or _root(thing) == "tensorflow"
    return _root(type(thing)) == "tensorflow" or isinstance(thing, sys.modules["tensorflow"].Module)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # asking is the point
    except ValueError:
        return False
    return True


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]
