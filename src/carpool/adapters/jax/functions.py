"""The functions of a stack's rows: traced for each of them, told to be one but for numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from carpool.adapters.jax.build import Built
from carpool.adapters.jax.lift import Lifted, lifted
from carpool.adapters.jax.recipe import Recipes
from carpool.adapters.jax.streams import Streamed


class Functions:
    """What the rows of a stack compute, by the samples in a batch."""

    def __init__(self, builts: Sequence[Built], recipes: Recipes) -> None:
        self._builts, self._recipes = list(builts), recipes
        if len(self._builts) > 1:
            recipes.confirm(self._builts)
        self._made: dict[Any, Lifted] = {}

    def gradient(self, size: int) -> Lifted:
        return self._of(("gradient", size), lambda built: self._recipes.gradient(built, size))

    def update(self) -> Lifted:
        return self._of("update", self._recipes.update)

    def evaluate(self, size: int, rows: Sequence[int]) -> Lifted:
        """Of these rows alone: not every row has validation data."""
        return self._of(
            ("evaluate", size, tuple(rows)), lambda built: self._recipes.evaluate(built, size), rows
        )

    def _of(self, key: Any, trace: Any, rows: Sequence[int] | None = None) -> Lifted:
        if key not in self._made:
            chosen = self._builts if rows is None else [self._builts[row] for row in rows]
            self._made[key] = lifted([trace(built) for built in chosen])
        return self._made[key]


def sizes(built: Built) -> set[int]:
    """Samples in a batch, and in the last one of an epoch; of a stream, those of its first batch."""
    if isinstance(built.data, Streamed):
        return {built.data.length}
    length, size = built.data.length, built.job.batch_size
    return ({size} if length >= size else set()) | ({length % size} if length % size else set())


def typed(inputs: Any) -> Any:
    """Arrays of the types that JAX gives them, so that a program compiled for one call takes the next."""
    return jax.tree.map(_typed, inputs)


def _typed(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    held = np.asarray(leaf)
    return held.astype(jax.dtypes.canonicalize_dtype(held.dtype), copy=False)
