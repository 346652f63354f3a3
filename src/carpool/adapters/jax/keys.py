"""Random keys: a job's own, by its seed and step alone, so that they are the same whoever runs beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.arguments import Arguments

_STEPS = 0xFFFFFFFF
"""What the steps' keys are folded from: `split(key, n)` gives the keys `fold_in(key, 0..n-1)`, and a model's init splits its key."""
_MASK = 0xFFFFFFFF


def init_key(seed: int) -> Any:
    """The key that a job's factory is called with: `jax.random.key(seed)`.

    >>> bool(init_key(3) == jax.random.key(3))
    True
    """
    return jax.random.key(seed if _is_short(seed) else np.int32(seed & 0x7FFFFFFF))


def init_keys(seeds: Iterable[int]) -> Any:
    """`init_key` of each seed, in one array."""
    short = [seed if _is_short(seed) else seed & 0x7FFFFFFF for seed in seeds]
    return jax.vmap(jax.random.key)(jnp.asarray(np.asarray(short, np.int64)))


def _is_short(seed: int) -> bool:
    return -(1 << 31) <= seed < 1 << 31


def steps_key(seed: int) -> Any:
    """What the keys of a job's steps are folded from."""
    return steps_key_of(init_key(seed))


def steps_keys(seeds: Iterable[int]) -> Any:
    """`steps_key` of each seed, in one array."""
    return jax.vmap(steps_key_of)(init_keys(seeds))


def steps_key_of(key: Any) -> Any:
    """The same, from the key that the factory is called with."""
    return jax.random.fold_in(key, np.uint32(_STEPS))


def step_key(seed: int, step: int) -> Any:
    """The key of a job's step, counted from 0 over the whole job. Public, so that anyone can reproduce a run in a loop of their own."""
    says = Arguments()
    seed = says.whole("seed", seed, "pass the job's seed")
    step = says.whole("step", step, "count steps from 0", 0)
    return jax.random.fold_in(steps_key(seed), np.uint32(step & _MASK))
