"""A function as JAX traces it, its numbers apart: equal but for numbers means one program for both, each with its own.

A learning rate, a dropout rate or a schedule's length is a scalar constant of the trace. `Traced.text` says all that the function does but
for these; `Traced.numbers` are they, in order. `Traced.run` runs it with other numbers in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from carpool.adapters.base import Unstackable
from carpool.adapters.jax.replay import Numbers, Operators, replayed
from carpool.adapters.jax.telling import told


@dataclass(frozen=True)
class Traced:
    """A traced function of nests of arrays."""

    closed: Any
    out_tree: Any
    text: Hashable
    numbers: tuple[Any, ...]
    own: tuple[Any, ...]
    """The numbers that are in `closed`: another function's, where this one was told without tracing it."""
    is_pure: bool
    """Whether it does nothing beside computing: no printing, no calls back to Python."""

    def run(self, inputs: Sequence[Any], numbers: Numbers, operators: Operators | None = None) -> Any:
        """The function of these inputs, flat or nested as they were traced."""
        given = {
            place: np.asarray(number)
            for place, (number, own) in enumerate(zip(self.numbers, self.own, strict=True))
            if number is not own and repr(number) != repr(own)
        }
        values = replayed(self.closed, jax.tree.leaves(list(inputs)), {**given, **numbers}, operators)
        return jax.tree.unflatten(self.out_tree, values)


def traced(function: Callable[..., Any], *inputs: Any) -> Traced:
    """The function traced for inputs of these shapes and types; nothing is computed."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)
    text, numbers = told(closed)
    out_tree = jax.tree.structure(shapes)
    return Traced(closed, out_tree, (text, str(out_tree)), numbers, numbers, not closed.jaxpr.effects)


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

    def run(self, inputs: Sequence[Any], numbers: Sequence[Any], operators: Operators | None = None) -> Any:
        """One row's function, with the row's own numbers."""
        own = {place: numbers[column] for place, column in self.places.items()}
        return self.traced.run(inputs, own, operators)


def lifted(rows: Sequence[Traced]) -> Lifted:
    """The function of rows that differ in numbers alone."""
    if len({row.text for row in rows}) > 1:
        raise Unstackable("their steps, traced at another batch size, differ in more than numbers")
    columns: dict[Hashable, int] = {}
    places: dict[int, int] = {}
    for place, column in enumerate(zip(*(row.numbers for row in rows), strict=True)):
        if any(repr(number) != repr(column[0]) for number in column):
            places[place] = columns.setdefault(column, len(columns))
    return Lifted(rows[0], tuple(np.asarray(column) for column in columns), places)
