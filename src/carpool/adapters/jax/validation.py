"""Validation of a stack's rows: sums over their validation data, full batches first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from carpool.adapters.base import MetricRow
from carpool.adapters.jax import program, programs
from carpool.adapters.jax.build import Arrays, Built
from carpool.adapters.jax.functions import Functions, typed
from carpool.adapters.jax.pool import Pool, Store
from carpool.adapters.jax.program import Formulation, State


class Validation:
    """The validation data of rows, those of one length and batch size together."""

    def __init__(self, builts: Sequence[Built], store: Store, device: Any) -> None:
        alike: dict[tuple[int, int], dict[int, Arrays]] = {}
        for row, built in enumerate(builts):
            if built.validation is not None:
                shape = (built.validation.length, min(built.validation.length, built.job.batch_size))
                alike.setdefault(shape, {})[row] = built.validation
        self._width = len(builts)
        self._pools = {
            shape: (Pool(list(rows.values()), store, device), list(rows)) for shape, rows in alike.items()
        }

    def evaluate(
        self, rows: Sequence[int], state: State, keys: Any, functions: Functions, way: Formulation
    ) -> tuple[MetricRow, ...]:
        shown: list[MetricRow] = []
        asked = frozenset(rows)
        for (length, size), (pool, held) in self._pools.items():
            wanted = [(place, row) for place, row in enumerate(held) if row in asked]
            if not wanted:
                continue
            chosen = slice(None) if len(held) == self._width else np.asarray(held)
            own, own_keys = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], (state, keys))
            totals = self._totals(length, size, pool, held, own, own_keys, functions, way)
            shown += [
                MetricRow(row, 0, length, {name: float(v[place]) for name, v in totals.items()})
                for place, row in wanted
            ]
        return tuple(sorted(shown, key=lambda row: row.row))

    def _totals(
        self,
        length: int,
        size: int,
        pool: Pool,
        rows: Sequence[int],
        state: State,
        keys: Any,
        functions: Functions,
        way: Formulation,
    ) -> Mapping[str, np.ndarray]:
        totals: dict[str, np.ndarray] = {}
        way = program.ALONE if len(rows) == 1 else way
        for steps, batch, start in ((length // size, size, 0), (1, length % size, length - length % size)):
            if batch == 0:
                continue
            function = functions.evaluate(batch, rows)
            inputs = typed((state, pool.nest, pool.starts + np.int32(start), keys, function.columns))
            key = ("evaluate", way.name, steps, batch, function.key)

            def make(function: Any = function, steps: int = steps, batch: int = batch) -> Any:
                return program.evaluation(function, steps, batch, way)

            found = jax.device_get(programs.program(key, make, inputs, donated=False).result()(*inputs))
            totals = {name: values + totals.get(name, 0.0) for name, values in found.items()}
        return totals
