"""Traces that need not be made: of functions that differ in numbers they hold, a few are traced, and those tell the others'.

A sweep of a thousand learning rates has a thousand optimizers of one make. What their traces differ in are numbers, and each of these is a
number that the optimizer holds, or a simple function of one. After three traces that is known, exactly, and the rest are told by it. Before a
stack relies on it, the members at both ends of every number are traced too (`Families.confirm`): a rule with a bend in it would show there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from carpool.adapters.jax.lift import Traced
from carpool.marks import Code, Made, Plain

Held = tuple[float, ...]
"""The numbers that a function holds, in order."""
_SAMPLES = 3
_PLAIN: Mapping[str, Callable[[float], float]] = {
    "itself": lambda x: x,
    "its negative": lambda x: -x,
    "one less it": lambda x: 1 - x,
    "its inverse": lambda x: 1 / x,
    "its square": lambda x: x * x,
}
_ROUNDED = {"": float, "float32": np.float32, "bfloat16": jnp.bfloat16, "float16": np.float16}
Form = tuple[str, str]
_FORMS: tuple[Form, ...] = tuple(product(_PLAIN, _ROUNDED))
"""What a number of a trace may be of one that the function holds, and the type that it is rounded to."""


def _formed(form: Form, held: float) -> float:
    with np.errstate(over="ignore"):
        return float(_ROUNDED[form[1]](_PLAIN[form[0]](held)))


def apart(mark: Hashable) -> tuple[Hashable, Held]:
    """A fingerprint without its floating point numbers, and these. Their sign stays, and whether they are zero or not finite.

    >>> from carpool.fingerprint import fingerprint
    >>> apart(fingerprint((0.5, "a", 2)))[1]
    (0.5,)
    """
    numbers: list[float] = []
    return _without(mark, numbers), tuple(numbers)


def _without(mark: Any, numbers: list[float]) -> Any:
    if isinstance(mark, Plain):
        if mark.type is not float:
            return mark
        number = float(str(mark.key))
        numbers.append(number)
        return Plain(float, (number > 0) - (number < 0) if math.isfinite(number) else mark.key)
    if isinstance(mark, Made):
        return Made(mark.kind, tuple(_without(part, numbers) for part in mark.parts))
    if type(mark) is tuple and not isinstance(mark, Code):
        return tuple(_without(part, numbers) for part in mark)
    return mark


@dataclass
class Family:
    """Functions of one make."""

    traces: dict[Held, Traced] = field(default_factory=dict)
    _rule: dict[int, list[tuple[int, Form]]] | None = None
    """For each number of the trace that differs, which held numbers it may come from, and how."""

    def told(self, held: Held) -> Traced | None:
        """The trace of the function that holds these numbers, where that is known without tracing."""
        if held in self.traces:
            return self.traces[held]
        if self._rule is None or not self._covers(held):
            return None
        first = next(iter(self.traces.values()))
        numbers = list(first.numbers)
        for place, sources in self._rule.items():
            values = {_formed(form, held[source]) for source, form in sources}
            if len(values) != 1:
                return None
            numbers[place] = values.pop()
        return replace(first, numbers=tuple(numbers))

    def _covers(self, held: Held) -> bool:
        """Whether it differs from the traced ones in nothing but numbers that differed among them."""
        seen = [{known[i] for known in self.traces} for i in range(len(held))]
        return all(
            number in values or len(values) >= _SAMPLES for number, values in zip(held, seen, strict=True)
        )

    def learn(self, held: Held, traced: Traced) -> None:
        self.traces[held] = traced
        self._rule = self._found() if len(self.traces) >= _SAMPLES else None

    def _found(self) -> dict[int, list[tuple[int, Form]]] | None:
        """The rule that explains every trace so far, or None."""
        rows = list(self.traces.items())
        if len({traced.text for _, traced in rows}) > 1:
            return None
        varying = [i for i in range(len(rows[0][0])) if len({held[i] for held, _ in rows}) >= _SAMPLES]
        rule: dict[int, list[tuple[int, Form]]] = {}
        for place, column in enumerate(zip(*(traced.numbers for _, traced in rows), strict=True)):
            if len(set(column)) == 1:
                continue
            sources = [
                (i, form)
                for i in varying
                for form in _FORMS
                if all(_equal(form, held[i], n) for (held, _), n in zip(rows, column, strict=True))
            ]
            if not sources:
                return None
            rule[place] = sources
        return rule


def _equal(form: Form, held: float, number: Any) -> bool:
    try:
        return _formed(form, held) == number
    except ZeroDivisionError:
        return False


class Rule(NamedTuple):
    """A function before it is traced: what its trace hangs on beside itself, its fingerprint with the numbers apart, and how it is traced."""

    key: Hashable
    mark: tuple[Hashable, Held]
    make: Callable[[], Traced]


class Families:
    """All of a run's."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Family] = {}
        self._is_trusted = True

    def traced(self, rule: Rule) -> Traced:
        key, (make_of, held), make = rule
        family = self._made.setdefault((key, make_of), Family())
        found = family.told(held) if self._is_trusted else family.traces.get(held)
        if found is None:
            found = make()
            family.learn(held, found)
        return found

    def confirm(self, rows: Sequence[Rule]) -> bool:
        """Traces the rows at both ends of every number; whether all of them are as they were told. If not, nothing is told any more."""
        held = [rule.mark[1] for rule in rows]
        ends = {
            pick(range(len(rows)), key=lambda row: held[row][i])
            for i in range(len(held[0]))
            for pick in (min, max)
            if len({numbers[i] for numbers in held}) > 1
        }
        for row in ends:
            told, made = self.traced(rows[row]), rows[row].make()
            if (told.text, told.numbers) != (made.text, made.numbers):
                self._is_trusted = False
                self._made.clear()
                return False
        return True
