"""Members' states: stacked on the host, one array for each leaf, and taken out again by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.base import JobState
from carpool.adapters.jax.program import State
from carpool.planning.cursor import Cursor


def stacked(members: Sequence[State]) -> State:
    """By way of the host: one copy of each leaf, whatever the number of members, instead of an operation for each."""
    columns = zip(*map(jax.tree.leaves, members), strict=True)
    return jax.tree.unflatten(jax.tree.structure(members[0]), [_stack(column) for column in columns])


def _stack(rows: Sequence[Any]) -> Any:
    """Rows under one another. What all have in common is copied on the device; rows that lie so already are not copied at all."""
    first, count = rows[0], len(rows)
    if count > 1 and all(row is first for row in rows):
        return jnp.broadcast_to(first, (count, *jnp.shape(first)))
    whole = getattr(first, "base", None)
    if isinstance(whole, np.ndarray) and whole.shape == (count, *first.shape) and whole.dtype == first.dtype:
        start, step = whole.ctypes.data, whole.strides[0]
        lies = (row.ctypes.data == start + place * step for place, row in enumerate(rows))
        if all(
            getattr(row, "base", None) is whole and row.strides == whole.strides[1:] for row in rows
        ) and all(lies):
            return whole
    return np.stack([np.asarray(row) for row in jax.device_get(list(rows))])


def unstacked(state: State, rows: Sequence[int]) -> tuple[JobState, ...]:
    """Rows of a state on the host, leaf by leaf under its name."""
    names, leaves = _named(state), jax.tree.leaves(state)
    return tuple(_job_state(names, [np.asarray(leaf[row]) for leaf in leaves]) for row in rows)


def taken(state: State, rows: Sequence[int]) -> tuple[JobState, ...]:
    """The same of a state on a device, where its rows stay."""
    names, leaves = _named(state), jax.tree.leaves(state)
    return tuple(_job_state(names, row_of(leaves, np.int32(row))) for row in rows)


@jax.jit
def row_of(leaves: list[Any], row: Any) -> list[Any]:
    """A row of every array, in one launch."""
    return [leaf[row] for leaf in leaves]


def _job_state(names: Sequence[tuple[str, str]], leaves: Sequence[Any]) -> JobState:
    held: dict[str, dict[str, Any]] = {"trained": {}, "rest": {}, "optimizer": {}}
    for (part, name), leaf in zip(names, leaves, strict=True):
        held[part][name] = leaf
    return JobState(Cursor(), {**held["trained"], **held["rest"]}, {"state": held["optimizer"]})


def restored(state: JobState, like: State) -> State:
    """The nests of one member again."""
    held = {**state.model, **state.optimizer["state"]}
    leaves = [held[name] for _, name in _named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def loaded(stack: State, row: int, state: JobState) -> State:
    """A stack on the host with this row as the state says."""
    own = restored(state, stack)

    def put(held: Any, value: Any) -> Any:
        held = np.array(held)
        held[row] = value
        return held

    return jax.tree.map(put, stack, own)


def _named(state: State) -> tuple[tuple[str, str], ...]:
    """Of each leaf the part of the state that it belongs to, and its name."""
    return _names(jax.tree.structure(state))


@lru_cache(maxsize=64)
def _names(tree: Any) -> tuple[tuple[str, str], ...]:
    nest: State = jax.tree.unflatten(tree, range(tree.num_leaves))
    return tuple(
        (part, part + jax.tree_util.keystr(path))
        for part, own in zip(State._fields, nest, strict=True)
        for path, _ in jax.tree_util.tree_flatten_with_path(own)[0]
    )
