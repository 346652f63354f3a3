"""Members' states: stacked on the host, one array for each leaf, and taken out again by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from carpool.adapters.base import JobState
from carpool.adapters.jax.program import State
from carpool.planning.cursor import Cursor


def stacked(members: Sequence[State]) -> State:
    """By way of the host: one copy of each leaf, whatever the number of members, instead of an operation for each."""
    host = jax.device_get(list(members))
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *host)


def unstacked(state: State, row: int) -> JobState:
    """A row of a state on the host, leaf by leaf under its name."""
    return JobState(
        Cursor(),
        {**_named("trained", state.trained, row), **_named("rest", state.rest, row)},
        {"state": _named("optimizer", state.optimizer, row)},
    )


def restored(state: JobState, like: State) -> State:
    """The nests of one member again."""
    held = {**state.model, **state.optimizer["state"]}
    return State(
        _nested("trained", like.trained, held),
        _nested("rest", like.rest, held),
        _nested("optimizer", like.optimizer, held),
    )


def loaded(stack: State, row: int, state: JobState) -> State:
    """A stack on the host with this row as the state says."""
    own = restored(state, stack)

    def put(held: Any, value: Any) -> Any:
        held = np.array(held)
        held[row] = value
        return held

    return jax.tree.map(put, stack, own)


def _named(word: str, nest: Any, row: int) -> dict[str, np.ndarray]:
    found, _ = jax.tree_util.tree_flatten_with_path(nest)
    return {word + jax.tree_util.keystr(path): np.asarray(leaf[row]) for path, leaf in found}


def _nested(word: str, like: Any, held: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: held[word + jax.tree_util.keystr(path)], like)
