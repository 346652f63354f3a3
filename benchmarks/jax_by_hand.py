"""What a JAX user writes by hand for many models: vmap inside scan, and one model after another by scan. The same job as carpool's:
own weights, own rates, own order of one copy of the data, Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.jax_nets import Net, loss

_rule = optax.scale_by_adam()
Run = Callable[[int], None]
"""Trains on for so many epochs, and waits."""


def _begun(net: Net, key: Any) -> Any:
    p = net.init(key)
    return p, _rule.init(p)


def _epoch(net: Net, rates: Any, stacked: bool, x: Any, y: Any, state: Any, keys: Any) -> Any:
    """One epoch of every member in one program."""
    each: Any = jax.vmap if stacked else (lambda function, in_axes=0: function)
    count = len(x) // net.batch
    order = each(lambda key: jax.random.permutation(key, len(x)))(keys)
    order = order.reshape(*order.shape[:-1], count, net.batch)

    def step(state: Any, positions: Any, rate: Any) -> Any:
        p, held = state
        value, slopes = jax.value_and_grad(lambda p: loss(net.apply(p, x[positions]), y[positions]))(p)
        moves, held = _rule.update(slopes, held)
        return (jax.tree.map(lambda w, move: w - rate * move, p, moves), held), value

    def advance(state: Any, positions: Any) -> Any:
        return each(step)(state, positions, rates)

    return jax.lax.scan(advance, state, jnp.moveaxis(order, -2, 0))


def together(net: Net, members: int) -> Run:
    """vmap + scan."""
    keys = jax.random.split(jax.random.key(0), members)
    held = {"state": jax.jit(jax.vmap(partial(_begun, net)))(keys), "epoch": 0}
    return _runner(net, jnp.logspace(-4, -2, members), True, held, keys)


def in_turn(net: Net) -> Run:
    """One member, scan: what each of them takes when they take turns."""
    held = {"state": jax.jit(partial(_begun, net))(jax.random.key(0)), "epoch": 0}
    return _runner(net, jnp.float32(1e-3), False, held, jax.random.key(1))


def _runner(net: Net, rates: Any, stacked: bool, held: dict[str, Any], keys: Any) -> Run:
    x, y = jax.device_put(net.data())
    program = jax.jit(partial(_epoch, net, rates, stacked), donate_argnums=2)
    fold: Any = jax.vmap(jax.random.fold_in, (0, None)) if stacked else jax.random.fold_in

    def run(epochs: int) -> None:
        values = None
        for _ in range(epochs):
            held["state"], values = program(x, y, held["state"], fold(keys, held["epoch"]))
            held["epoch"] += 1
        jax.block_until_ready((held["state"], values))

    return run
