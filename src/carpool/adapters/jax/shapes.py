"""Shapes and types of nests of arrays: what tells one program from another, and what a population's batch must have."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from carpool.errors import DataError, sentence


def shapes(nest: Any) -> Hashable:
    leaves, tree = jax.tree.flatten(nest)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def shown(nest: Any) -> tuple[str, ...]:
    """Names, shapes and types, to be read."""
    found, _ = jax.tree_util.tree_flatten_with_path(nest)
    return tuple(f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in found)


def without(nest: Any, axes: int) -> Any:
    """A nest like this one, its arrays without so many leading axes and without values."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), nest)


def typed(nest: Any) -> Any:
    """Arrays of the types that JAX gives them, still on the host where they were."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf
        held = np.asarray(leaf)
        return held.astype(jax.dtypes.canonicalize_dtype(held.dtype), copy=False)

    return jax.tree.map(own, nest)


def length(nest: Any, axis: int, word: str, wanted: int | None = None) -> int:
    """How long this axis is, of all arrays."""
    found = {leaf.shape[axis] if leaf.ndim > axis else 0 for leaf in jax.tree.leaves(nest)}
    if len(found) == 1 and (only := next(iter(found))) and wanted in (None, only):
        return only
    expected = f"axis {axis} of every array of the batch to be the {word}"
    received = f"lengths {', '.join(map(str, sorted(found)))}" if found else "no array"
    remedy = "stack batches with np.stack"
    raise DataError(sentence(expected if wanted is None else f"{expected}, {wanted}", received, remedy))
