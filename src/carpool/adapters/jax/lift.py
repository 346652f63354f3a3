"""A function as JAX traces it, its numbers apart: equal but for numbers means one program for both, each with its own.

A learning rate, a dropout rate or a schedule's length is a scalar constant of the trace. `Traced.text` says all that the function does but
for these; `Traced.numbers` are they, in order. `Traced.run` runs it with other numbers in their places.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

_INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
"""Calls that mean what their inner trace means: numbers inside them are apart too."""
_LARGEST_DIGEST_BYTES = 16 << 20
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Numbers = Mapping[int, Any]
"""Scalars by their place in `Traced.numbers`; the others stay as they were traced."""


@dataclass(frozen=True)
class Traced:
    """A traced function of nests of arrays."""

    closed: Any
    out_tree: Any
    text: Hashable
    numbers: tuple[Any, ...]
    is_pure: bool
    """Whether it does nothing beside computing: no printing, no calls back to Python."""

    def run(self, inputs: Sequence[Any], numbers: Numbers) -> Any:
        """The function of these inputs, flat or nested as they were traced."""
        flat = jax.tree.leaves(list(inputs))
        count = iter(range(len(self.numbers)))
        values = _evaluated(self.closed.jaxpr, self.closed.consts, flat, numbers, count)
        return jax.tree.unflatten(self.out_tree, values)


def traced(function: Callable[..., Any], *inputs: Any) -> Traced:
    """The function traced for inputs of these shapes and types; nothing is computed."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)
    numbers: list[Any] = []
    parts = tuple(_described(closed.jaxpr, closed.consts, numbers))
    out_tree = jax.tree.structure(shapes)
    text = hashlib.blake2b(repr((parts, str(out_tree))).encode(), digest_size=16).hexdigest()
    return Traced(closed, out_tree, text, tuple(numbers), not closed.jaxpr.effects)


@dataclass(frozen=True)
class Lifted:
    """A function that many have in common, and the numbers in which they differ, by row."""

    traced: Traced
    columns: tuple[np.ndarray, ...]
    """Each [rows]."""
    places: Mapping[int, int]
    """Where in the trace which column belongs."""

    @property
    def key(self) -> Hashable:
        """What tells the function of one row from others, its own numbers apart."""
        fixed = tuple(n for place, n in enumerate(self.traced.numbers) if place not in self.places)
        return self.traced.text, tuple(self.places.items()), repr(fixed)

    def run(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """One row's function, with the row's own numbers."""
        return self.traced.run(inputs, {place: numbers[column] for place, column in self.places.items()})


def lifted(rows: Sequence[Traced]) -> Lifted:
    """The function of rows that differ in numbers alone."""
    columns: dict[Hashable, int] = {}
    places: dict[int, int] = {}
    for place, column in enumerate(zip(*(row.numbers for row in rows), strict=True)):
        if any(repr(number) != repr(column[0]) for number in column):
            places[place] = columns.setdefault(column, len(columns))
    return Lifted(rows[0], tuple(np.asarray(column) for column in columns), places)


# Telling


def _described(jaxpr: Any, consts: Sequence[Any], numbers: list[Any]) -> Iterator[Hashable]:
    names: dict[Any, int] = {}

    def name(var: Any) -> int:
        return names.setdefault(var, len(names))

    for var, const in zip(jaxpr.constvars, consts, strict=True):
        yield name(var), _constant(const, numbers)
    yield tuple((name(var), str(var.aval)) for var in jaxpr.invars)
    for eqn in jaxpr.eqns:
        used = tuple(
            _number(var, numbers) if isinstance(var, core.Literal) else name(var) for var in eqn.invars
        )
        yield (
            eqn.primitive.name,
            used,
            tuple(_params(eqn, numbers)),
            tuple(_out(var, name) for var in eqn.outvars),
        )
    yield tuple(
        _number(var, numbers) if isinstance(var, core.Literal) else name(var) for var in jaxpr.outvars
    )


def _out(var: Any, name: Callable[[Any], int]) -> tuple[int, str]:
    return name(var), str(var.aval)


def _params(eqn: Any, numbers: list[Any]) -> Iterator[Hashable]:
    if (inner := _inner(eqn)) is not None:
        yield from _described(inner.jaxpr, inner.consts, numbers)
        return
    for word, value in sorted(eqn.params.items()):
        yield word, _param(value)


def _param(value: Any) -> Hashable:
    """A parameter of an operation; of a trace inside one that is not inlined, all of it with its numbers."""
    if isinstance(value, core.ClosedJaxpr):
        return str(value.jaxpr), tuple(map(_digest, value.consts))
    if isinstance(value, core.Jaxpr):
        return str(value)
    if isinstance(value, tuple | list):
        return tuple(map(_param, value))
    if isinstance(value, np.ndarray | jax.Array):
        return _digest(value)
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _ADDRESS.sub("", repr(value))


def _inner(eqn: Any) -> Any:
    """The trace that a call stands for, closed; None for an operation."""
    if eqn.primitive.name not in _INLINED:
        return None
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    if inner is None or isinstance(inner, core.ClosedJaxpr):
        return inner
    return core.ClosedJaxpr(inner, ())


def _number(literal: Any, numbers: list[Any]) -> Hashable:
    numbers.append(np.asarray(literal.val).item())
    return "number", str(literal.aval)


def _constant(value: Any, numbers: list[Any]) -> Hashable:
    if np.ndim(value) == 0 and not _is_key(value):
        numbers.append(np.asarray(value).item())
        return "number", str(jax.typeof(value))
    return _digest(value)


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(_type(value), jax.dtypes.prng_key)


def _type(value: Any) -> Any:
    kind: Any = jax.typeof(value)
    return kind.dtype


def _digest(value: Any) -> Hashable:
    """What an array holds, or which one it is where that is long to read."""
    if _is_key(value):
        value = jax.random.key_data(value)
    held = np.asarray(value)
    if held.nbytes > _LARGEST_DIGEST_BYTES:
        return "array", held.shape, str(held.dtype), id(value)
    return held.shape, str(held.dtype), hashlib.blake2b(held.tobytes(), digest_size=16).hexdigest()


# Running


def _evaluated(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], numbers: Numbers, places: Iterator[int]
) -> list[Any]:
    """The trace's outputs. `places` counts numbers in the order in which `_described` met them."""
    values: dict[Any, Any] = {}

    def given(var: Any) -> Any:
        if not isinstance(var, core.Literal):
            return values[var]
        place, kind = next(places), cast(Any, var.aval)
        return numbers[place].astype(kind.dtype) if place in numbers else var.val

    for var, const in zip(jaxpr.constvars, consts, strict=True):
        values[var] = const
        if np.ndim(const) == 0 and not _is_key(const):
            place = next(places)
            if place in numbers:
                values[var] = numbers[place].astype(_type(const))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        used = [given(var) for var in eqn.invars]
        if (inner := _inner(eqn)) is not None:
            made = _evaluated(inner.jaxpr, inner.consts, used, numbers, places)
        else:
            with eqn.ctx.manager:
                made = eqn.primitive.bind(*used, **eqn.primitive.get_bind_params(eqn.params))
            made = made if eqn.primitive.multiple_results else [made]
        values |= dict(zip(eqn.outvars, made, strict=True))
    return [given(var) for var in jaxpr.outvars]
