"""Programs of a stack on JAX: steps of one member under scan, chunks and epochs of all members under vmap. Pure functions.

The state of a stack of one has no axis for its rows: it is the member's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def steps_of(step: Any, shows: bool) -> Any:
    """Many steps of one member. `shows`: a step shows more than its metrics say, and the last one's logs are wanted."""

    def run(state: Any, pool: Any, order: Any) -> Any:
        def advance(carried: Any, positions: Any) -> Any:
            logs, state = step(carried[0], jax.tree.map(lambda leaf: leaf[positions], pool))
            return (state, logs), None

        carried, left = (state, None), order
        if shows or len(order) == 1:  # a first step says what is carried on from step to step
            carried, left = advance(carried, order[0])[0], order[1:]
        return jax.lax.scan(advance, carried, left)[0] if len(left) else carried

    return run


def _begun(state: Any, starts: Sequence[Any], fresh: Any) -> Any:
    """The state with the metrics of a fresh member begun anew."""
    metrics = [
        jnp.where(fresh, start.astype(now.dtype), now) for start, now in zip(starts, state[3], strict=True)
    ]
    return (*state[:3], metrics)


def chunk(steps: Any, starts: Sequence[Any], results: Any, width: int) -> Any:
    """Steps of every row; rows that are not active keep what they had."""

    def member(state: Any, pool: Any, order: Any, fresh: Any) -> Any:
        state, logs = steps(_begun(state, starts, fresh), pool, order)
        return state, (logs, results(state[3]))

    def run(state: Any, pool: Any, order: Any, active: Any, fresh: Any) -> Any:
        after, logs = _each(member, width, len(order), 0)(state, pool, order, fresh)
        return _where(active, after, state, width), logs

    return run


def epochs(steps: Any, starts: Sequence[Any], results: Any, width: int, most: int, shows: bool) -> Any:
    """Whole epochs of every row, as many as `count` says: a loop on the device around those of an epoch's parts."""

    def epoch(state: Any, pool: Any, orders: Any) -> Any:
        state, logs = _begun(state, starts, True), None
        for order in orders:
            state, logs = steps(state, pool, order)
        return state, (logs, results(state[3]))

    def member(state: Any, pool: Any, orders: Any, count: Any) -> Any:
        if shows:
            empty = jax.eval_shape(epoch, state, pool, [order[0] for order in orders])[1]
        else:
            empty = (None, jax.eval_shape(results, state[3]))
        shown = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), empty)

        def advance(number: Any, carried: Any) -> Any:
            state, shown = carried
            state, logs = epoch(state, pool, [order[number] for order in orders])
            return state, jax.tree.map(lambda kept, log: kept.at[number].set(log), shown, logs)

        return jax.lax.fori_loop(0, count, advance, (state, shown))

    def run(state: Any, pool: Any, orders: Any, active: Any, count: Any) -> Any:
        after, logs = _each(member, width, len(orders[0]), None)(state, pool, orders, count)
        by_epoch = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), logs)
        return _where(active, after, state, width), by_epoch

    return run


def _each(member: Any, width: int, orders: int, last: int | None) -> Any:
    """A member's function of state, pool, order and one thing more, for every row. The pool is one for all; `orders` may be one for all, and `last` says
    whether the thing more is. A stack of one is not vmapped.
    """
    axes = (0, None, 0 if orders == width else None, last)
    if width > 1:

        def each(state: Any, pool: Any, order: Any, more: Any) -> Any:
            own = order if orders == width else jax.tree.map(lambda leaf: leaf[0], order)
            return jax.vmap(member, in_axes=axes)(state, pool, own, more)

        return each

    def alone(state: Any, *shared: Any) -> Any:
        own = [
            value if axis is None else jax.tree.map(lambda leaf: leaf[0], value)
            for value, axis in zip(shared, axes[1:], strict=True)
        ]
        after, logs = member(state, *own)
        return after, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], logs)

    return alone


def _where(active: Any, new: Any, old: Any, width: int) -> Any:
    def kept(after: Any, before: Any) -> Any:
        rows = active[0] if width == 1 else active.reshape(-1, *[1] * (after.ndim - 1))
        return jnp.where(rows, after, before)

    return jax.tree.map(kept, new, old)
