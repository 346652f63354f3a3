"""Programs of a stack: steps of all members in a loop on the device. Pure functions, nothing of a run in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.jax.convolve import apart, as_product, as_product_apart
from carpool.adapters.jax.lift import Lifted
from carpool.adapters.jax.replay import Operators

_EVALUATED = 0xFFFFFFFF  # the keys of validation are no step's


class State(NamedTuple):
    """What a member, or a stack of them, holds."""

    trained: Any
    rest: Any
    optimizer: Any


class Order(NamedTuple):
    """What rows read: places in the pool [rows or 1, samples], and where in them each row's next batch begins."""

    places: Any
    offsets: Any


class Formulation(NamedTuple):
    """How a member's function becomes one of all rows."""

    name: str
    each: Callable[..., Any]
    """Given the function and its in_axes."""
    operators: Operators
    """What operations are replaced by."""
    by_launch: bool = False
    """Whether a row takes all steps of a launch before the next row takes its own, instead of all rows step by step."""


def step_of(
    gradient: Lifted, update: Lifted, operators: Operators
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """One step of one member: (state, batch, key, numbers) to the state afterwards and scalars by name."""

    def step(state: State, batch: Any, key: Any, numbers: Any) -> tuple[State, dict[str, Any]]:
        values, rest, slopes = gradient.run((state.trained, state.rest, batch, key), numbers[0], operators)
        trained, optimizer = update.run((slopes, state.optimizer, state.trained), numbers[1])
        return State(trained, rest, optimizer), values

    return step


def training(
    gradient: Lifted, update: Lifted, steps: int, size: int, way: Formulation, shared: bool
) -> Callable[..., Any]:
    """So many steps of so many samples. A row that is not active, or whose loss is not finite, keeps every bit.

    `shared`: all rows read the same. Gives the state, sums of scalars over samples, steps taken, and who is still sound, each by row.
    """
    step = step_of(gradient, update, way.operators)

    def member(carried: Any, batch: Any, key: Any, number: Any, numbers: Any, active: Any) -> Any:
        state, sums, taken, sound = carried
        after, values = step(state, batch, jax.random.fold_in(key, number), numbers)
        runs = active & sound
        sound = sound & (~runs | jnp.isfinite(values["loss"]))
        kept = runs & sound
        state = jax.tree.map(lambda new, old: jnp.where(kept, new, old), after, state)
        sums = {
            name: total + jnp.where(kept, values[name].astype(total.dtype) * size, 0)
            for name, total in sums.items()
        }
        return state, sums, taken + kept, sound

    def run(
        state: State, pool: Any, order: Order, keys: Any, first: Any, numbers: Any, active: Any, count: Any
    ) -> Any:
        width = active.shape[0]
        places = _batches(order, steps, size, shared)
        sums = {name: jnp.zeros(width, kind) for name, kind in _scalars(gradient).items()}
        begun = (state, sums, jnp.zeros(width, jnp.int32), jnp.ones(width, bool))

        def one(
            carried: Any, batch: Any, key: Any, start: Any, numbers: Any, active: Any, number: Any
        ) -> Any:
            return member(
                carried, batch, key, start + number.astype(start.dtype), numbers, active & (number < count)
            )

        def launch(
            carried: Any, places: Any, key: Any, start: Any, numbers: Any, active: Any
        ) -> Any:  # of one row
            def advance(carried: Any, number: Any) -> Any:
                batch = _read(pool, _at(places, number))
                return one(carried, batch, key, start, numbers, active, number), None

            return _looped(advance, carried, steps)

        def step(carried: Any, number: Any) -> Any:  # of all rows
            chosen = _at(places, number)
            if shared:
                axes, read = (0, None, 0, 0, 0, 0, None), _read(pool, chosen)
                mapped = way.each(one, axes)
            else:
                axes, read = (0, 0, 0, 0, 0, 0, None), chosen
                mapped = way.each(
                    lambda carried, chosen, *rest: one(carried, _read(pool, chosen), *rest), axes
                )
            return mapped(carried, read, keys, first, numbers, active, number), None

        if way.by_launch:
            own = places if shared else jnp.swapaxes(places, 0, 1)
            axes = (0, None if shared else 0, 0, 0, 0, 0)
            return way.each(launch, axes)(begun, own, keys, first, numbers, active)
        return _looped(step, begun, steps)

    return run


def _at(places: Any, number: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(places, number, keepdims=False)


def _batches(order: Order, steps: int, size: int, shared: bool) -> Any:
    """Places of so many batches: [steps, rows, size], or [steps, size] of what all rows read. Past the end of an order nobody looks."""
    padded = jnp.pad(order.places, ((0, 0), (0, steps * size)))

    def own(places: Any, offset: Any) -> Any:
        return jax.lax.dynamic_slice(places, (offset,), (steps * size,)).reshape(steps, size)

    if shared:
        return own(padded[0], order.offsets[0])
    return jnp.swapaxes(jax.vmap(own)(padded, order.offsets), 0, 1)


def _read(pool: Any, places: Any) -> Any:
    """The samples at these places, which are places in the pool: no need to see to that."""
    return jax.tree.map(
        lambda leaf: leaf.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False), pool
    )


def evaluation(evaluate: Lifted, steps: int, size: int, way: Formulation) -> Callable[..., Any]:
    """A pass over so many batches, from `starts` on: sums of scalars over samples, by row."""

    def run(state: State, pool: Any, starts: Any, keys: Any, numbers: Any) -> Any:
        def one(state: State, start: Any, key: Any, numbers: Any, sums: Any, number: Any) -> Any:
            batch = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start + number * size, size), pool
            )
            key = jax.random.fold_in(jax.random.fold_in(key, np.uint32(_EVALUATED)), number)
            inputs = (state.trained, state.rest, batch, key)
            values = evaluate.run(inputs, numbers, way.operators)
            return {name: total + values[name].astype(total.dtype) * size for name, total in sums.items()}

        def advance(sums: Any, number: Any) -> Any:
            return way.each(one, (0, 0, 0, 0, 0, None))(state, starts, keys, numbers, sums, number), None

        begun = {name: jnp.zeros(len(starts), kind) for name, kind in _scalars(evaluate).items()}
        return _looped(advance, begun, steps)

    return run


def _looped(advance: Callable[..., Any], begun: Any, steps: int) -> Any:
    """One step is no loop: XLA's convolutions on a CPU take twenty times as long inside of one."""
    if steps == 1:
        return advance(begun, jnp.zeros((), jnp.int32))[0]
    return jax.lax.scan(advance, begun, jnp.arange(steps, dtype=jnp.int32))[0]


def _mapped(function: Any, axes: Any) -> Any:
    """All rows at once."""
    return jax.vmap(function, in_axes=axes)


def _alone(function: Any, axes: Any) -> Any:
    """The one row of a stack of one, without the operations of a stack."""

    def run(*inputs: Any) -> Any:
        own = [
            value if axis is None else jax.tree.map(lambda leaf: leaf[0], value)
            for value, axis in zip(inputs, axes, strict=True)
        ]
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], function(*own))

    return run


def _in_turn(function: Any, axes: Any) -> Any:
    """One row after another, inside the program: for steps that are slower stacked."""

    def run(*inputs: Any) -> Any:
        held = [value for value, axis in zip(inputs, axes, strict=True) if axis is not None]

        def one(own: Any) -> Any:
            left = iter(own)
            return function(
                *(value if axis is None else next(left) for value, axis in zip(inputs, axes, strict=True))
            )

        return jax.lax.map(one, tuple(held))

    return run


MAPPED = Formulation("stacked", _mapped, {})
PRODUCT = Formulation("convolutions as products", _mapped, {"conv_general_dilated": as_product})
APART = MAPPED._replace(operators={"conv_general_dilated": apart})
PRODUCT_APART = PRODUCT._replace(operators={"conv_general_dilated": as_product_apart})
IN_TURN = Formulation("members in turn", _in_turn, {}, by_launch=True)
ALONE = Formulation("alone", _alone, {}, by_launch=True)


def _scalars(function: Lifted) -> dict[str, Any]:
    """The scalars that a function gives, and the types to add them up in."""
    made = jax.tree.unflatten(function.traced.out_tree, function.traced.closed.out_avals)
    named = made[0] if isinstance(made, tuple) else made
    return {name: jnp.promote_types(aval.dtype, jnp.float32) for name, aval in sorted(named.items())}
