"""What a trace does, as a text in which scalar constants have no values: they are told apart, in order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
)
"""Calls that mean what their inner trace means."""
LOOPS = ("cond", "scan", "while")
_LARGEST_DIGEST_BYTES = 16 << 20
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_INNER = ("jaxpr", "call_jaxpr", "branches", "cond_jaxpr", "body_jaxpr")


def told(closed: Any) -> tuple[str, tuple[Any, ...]]:
    """The text of a closed trace, and its numbers."""
    numbers: list[Any] = []
    parts = tuple(_told(closed, numbers))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest(), tuple(numbers)


def inner(eqn: Any) -> tuple[Any, ...]:
    """The traces inside an operation whose numbers are told apart too, in order; none for any other."""
    if eqn.primitive.name not in (*INLINED, *LOOPS):
        return ()
    found: list[Any] = []
    for word in _INNER:
        held = eqn.params.get(word, ())
        found += held if isinstance(held, tuple | list) else [held]
    return tuple(one if isinstance(one, core.ClosedJaxpr) else core.ClosedJaxpr(one, ()) for one in found)


def is_number(value: Any) -> bool:
    """Whether a constant is told apart: a scalar, and no random key."""
    return np.ndim(value) == 0 and not _is_key(value)


def _told(closed: Any, numbers: list[Any]) -> Iterator[Hashable]:
    names: dict[Any, int] = {}

    def name(var: Any) -> int:
        return names.setdefault(var, len(names))

    def used(var: Any) -> Hashable:
        return _number(var.val, str(var.aval), numbers) if isinstance(var, core.Literal) else name(var)

    for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        kind = str(jax.typeof(const))
        yield name(var), _number(const, kind, numbers) if is_number(const) else digest(const)
    yield tuple((name(var), str(var.aval)) for var in closed.jaxpr.invars)
    for eqn in closed.jaxpr.eqns:
        inputs = tuple(map(used, eqn.invars))
        params = tuple(_params(eqn, numbers))
        yield eqn.primitive.name, inputs, params, tuple((name(var), str(var.aval)) for var in eqn.outvars)
    yield tuple(map(used, closed.jaxpr.outvars))


def _params(eqn: Any, numbers: list[Any]) -> Iterator[Hashable]:
    traces = inner(eqn)
    for one in traces:
        yield from _told(one, numbers)
    if eqn.primitive.name in INLINED:
        return
    for word, value in sorted(eqn.params.items()):
        if not (traces and word in _INNER):
            yield word, _param(value)


def _param(value: Any) -> Hashable:
    """A parameter of an operation; of a trace inside one that is not looked into, all of it with its numbers."""
    if isinstance(value, core.ClosedJaxpr):
        return str(value.jaxpr), tuple(map(digest, value.consts))
    if isinstance(value, core.Jaxpr):
        return str(value)
    if isinstance(value, tuple | list):
        return tuple(map(_param, value))
    if isinstance(value, np.ndarray | jax.Array):
        return digest(value)
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _ADDRESS.sub("", repr(value))


def _number(value: Any, kind: str, numbers: list[Any]) -> Hashable:
    numbers.append(np.asarray(value).item())
    return "number", kind


def digest(value: Any) -> Hashable:
    """What an array holds, or which one it is where that is long to read."""
    held = np.asarray(jax.random.key_data(value) if _is_key(value) else value)
    if held.nbytes > _LARGEST_DIGEST_BYTES:
        return "array", held.shape, str(held.dtype), id(value)
    return held.shape, str(held.dtype), hashlib.blake2b(held.tobytes(), digest_size=16).hexdigest()


def _is_key(value: Any) -> bool:
    kind: Any = jax.typeof(value)
    return jnp.issubdtype(kind.dtype, jax.dtypes.prng_key)


def count(closed: Any) -> int:
    """How many numbers a trace has."""
    jaxpr = closed.jaxpr
    own = sum(is_number(const) for const in closed.consts)
    own += sum(isinstance(var, core.Literal) for var in jaxpr.outvars)
    for eqn in jaxpr.eqns:
        own += sum(isinstance(var, core.Literal) for var in eqn.invars)
        own += sum(map(count, inner(eqn)))
    return own


def names_of(closed: Any) -> set[str]:
    """The operations of a trace, and of all traces inside."""
    found: set[str] = set()
    for eqn in closed.jaxpr.eqns:
        found.add(eqn.primitive.name)
        for one in inner(eqn):
            found |= names_of(one)
    return found
