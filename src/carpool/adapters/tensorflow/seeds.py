"""Random seeds: a job's own, by its seed and step alone, so that they are the same whoever runs beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from carpool.arguments import MOST, Arguments
from carpool.random import philox, signed_seed

_STEPS = 0x7F5EED  # tells a step's numbers from those that a factory draws from the job's seed
_MASK = 0xFFFFFFFF


def seed_word(seed: int) -> int:
    """What tells a job's seeds from another job's: the first of the two words of each of its steps' seeds."""
    low = int(seed) & 0xFFFFFFFFFFFFFFFF
    first, second, _, _ = philox((_STEPS, 0, 0, 0), (low & _MASK, low >> 32))
    return signed_seed((first << 32) | second)


def step_seed(seed: int, step: int) -> tf.Tensor:
    """The seed that a job's step is given, for `tf.random.stateless_*`: by the job's seed, and the step counted from 0 over the whole job.

    Public, so that anyone can reproduce a run in a loop of their own.

    >>> step_seed(3, 0).shape, bool(tf.reduce_all(step_seed(3, 0) == step_seed(3, 1)))
    (TensorShape([2]), False)
    """
    says = Arguments()
    seed = says.whole("seed", seed, "pass the job's seed")
    step = says.whole("step", step, "count steps from 0", 0, MOST)
    return tf.constant(np.asarray([seed_word(seed), step], np.int64))


def seed_at(word: Any, step: Any) -> Any:
    """`step_seed` inside a trace."""
    return tf.stack([tf.cast(word, tf.int64), tf.cast(step, tf.int64)])
