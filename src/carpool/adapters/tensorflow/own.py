"""A job's functions without anybody else's trace: where they are, or call, a `tf.function`, the job traces a copy of its own.

A `tf.function` may create variables in its first call only. One train step for several models, as people write it at the top of a
file, therefore fails at the second model, whose optimizer makes its slots then. Python underneath is the same for all of them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

_autograph: Any = tf.__internal__.autograph  # type: ignore[attr-defined]


def owned(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the job's own trace calls it, `if` and `for` over tensors converted as `tf.function` does."""
    if isinstance(function, Function) and function._autograph is False:
        return function.python_function
    return _autograph.tf_convert(_copied(function), _autograph.control_status_ctx())


def _copied(thing: Any) -> Any:
    """The same without a `tf.function` that others may have traced."""
    if isinstance(thing, Function):
        return thing.python_function
    if isinstance(thing, functools.partial):
        keywords = {name: _fresh(value) for name, value in thing.keywords.items()}
        return functools.partial(_copied(thing.func), *map(_fresh, thing.args), **keywords)
    if type(thing) is types.FunctionType:
        return _rebound(thing)
    return thing


def _fresh(thing: Any) -> Any:
    """A `tf.function` that nobody has traced, of the same Python; anything else as it is."""
    return thing._clone(thing.python_function) if isinstance(thing, Function) else thing


def _rebound(function: types.FunctionType) -> types.FunctionType:
    """The function with fresh ones in place of those that it names; itself where it names none."""
    names = {name for name in function.__code__.co_names if isinstance(_named(function, name), Function)}
    cells = function.__closure__ or ()
    fresh = tuple(
        types.CellType(_fresh(cell.cell_contents)) if isinstance(_held(cell), Function) else cell
        for cell in cells
    )
    if not names and all(a is b for a, b in zip(cells, fresh, strict=True)):
        return function
    namespace = {**function.__globals__, **{name: _fresh(_named(function, name)) for name in names}}
    made = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, fresh or None
    )
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    return made


def _named(function: types.FunctionType, name: str) -> Any:
    return function.__globals__.get(name)


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
