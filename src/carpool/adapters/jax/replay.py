"""A trace run again, with other numbers in the places of its own. Under whatever transformation the caller is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import jax
from jax.extend import core

from carpool.adapters.jax.telling import INLINED, count, inner, is_number, names_of

Numbers = Mapping[int, Any]
"""Scalars by their place in a trace; the others stay as they were traced."""
Operators = Mapping[str, Callable[..., Any]]
"""Functions that take the place of operations, by name: (*inputs, **parameters) to the output."""


def replayed(
    closed: Any, inputs: Sequence[Any], numbers: Numbers, operators: Operators | None = None
) -> list[Any]:
    """What the trace computes of these inputs."""
    return _Replay(numbers, operators or {}).run(closed, inputs, 0)


class _Replay:
    def __init__(self, numbers: Numbers, operators: Operators) -> None:
        self._numbers, self._operators = numbers, operators

    def run(self, closed: Any, inputs: Sequence[Any], first: int) -> list[Any]:
        """`first` is the place of the trace's first number. Places are met in the order in which they were told."""
        places, values = iter(range(first, first + count(closed))), {}

        def given(var: Any) -> Any:
            if not isinstance(var, core.Literal):
                return values[var]
            return self._number(next(places), var.val, var.aval)

        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            values[var] = self._number(next(places), const, var.aval) if is_number(const) else const
        values.update(zip(closed.jaxpr.invars, inputs, strict=True))
        for eqn in closed.jaxpr.eqns:
            used = [given(var) for var in eqn.invars]
            values.update(zip(eqn.outvars, self._operated(eqn, used, places), strict=True))
        return [given(var) for var in closed.jaxpr.outvars]

    def _number(self, place: int, own: Any, aval: Any) -> Any:
        return self._numbers[place].astype(aval.dtype) if place in self._numbers else own

    def _operated(self, eqn: Any, used: Sequence[Any], places: Iterator[int]) -> Sequence[Any]:
        traces = inner(eqn)
        counts = [count(one) for one in traces]
        taken = list(islice(places, sum(counts)))
        starts = [taken[sum(counts[:i])] if n else 0 for i, n in enumerate(counts)]
        if traces and self._changes(traces, taken):
            return self._inside(eqn, traces, starts, used)
        if eqn.primitive.name in self._operators:
            return [self._operators[eqn.primitive.name](*used, **eqn.params)]
        with eqn.ctx.manager:
            made = eqn.primitive.bind(*used, **eqn.primitive.get_bind_params(eqn.params))
        return made if eqn.primitive.multiple_results else [made]

    def _changes(self, traces: Sequence[Any], taken: Sequence[int]) -> bool:
        """Whether something inside is other than it was traced."""
        if any(place in self._numbers for place in taken):
            return True
        return bool(self._operators) and any(names_of(one) & self._operators.keys() for one in traces)

    def _inside(
        self, eqn: Any, traces: Sequence[Any], starts: Sequence[int], used: Sequence[Any]
    ) -> Sequence[Any]:
        if eqn.primitive.name in INLINED:
            return self.run(traces[0], used, starts[0])
        return getattr(self, f"_{eqn.primitive.name}")(eqn.params, traces, starts, used)

    def _cond(
        self, params: Any, traces: Sequence[Any], starts: Sequence[int], used: Sequence[Any]
    ) -> Sequence[Any]:
        branches = [
            lambda *inputs, one=one, start=start: self.run(one, inputs, start)
            for one, start in zip(traces, starts, strict=True)
        ]
        return jax.lax.switch(used[0], branches, *used[1:])

    def _scan(
        self, params: Any, traces: Sequence[Any], starts: Sequence[int], used: Sequence[Any]
    ) -> Sequence[Any]:
        consts, carries = params["num_consts"], params["num_carry"]
        held, begun, rows = used[:consts], used[consts : consts + carries], used[consts + carries :]

        def body(carried: Any, row: Any) -> Any:
            made = self.run(traces[0], [*held, *carried, *row], starts[0])
            return made[:carries], made[carries:]

        options = {word: params[word] for word in ("length", "reverse", "unroll")}
        carried, made = jax.lax.scan(body, list(begun), list(rows), **options)
        return [*carried, *made]

    def _while(
        self, params: Any, traces: Sequence[Any], starts: Sequence[int], used: Sequence[Any]
    ) -> Sequence[Any]:
        tested, stepped = params["cond_nconsts"], params["body_nconsts"]
        ours, theirs, begun = used[:tested], used[tested : tested + stepped], used[tested + stepped :]
        return jax.lax.while_loop(
            lambda carried: self.run(traces[0], [*ours, *carried], starts[0])[0],
            lambda carried: self.run(traces[1], [*theirs, *carried], starts[1]),
            list(begun),
        )
