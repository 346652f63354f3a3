"""One job over several devices: a module that was made under a `tf.distribute.MirroredStrategy` has a copy on each.

A batch is cut into as many parts as there are devices, sizes as equal as may be. Each part's loss counts by its share of the batch,
so that losses which are means over samples, and their gradients, add up to those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from carpool.adapters.tensorflow.held import Held, is_mirrored
from carpool.adapters.tensorflow.says import says
from carpool.adapters.tensorflow.step import Objective, gradients, packed
from carpool.errors import OptimizerError
from carpool.job import Job


def strategy_of(variables: Sequence[Held]) -> Any:
    """The strategy that mirrors these variables, or None."""
    return next((held.variable.distribute_strategy for held in variables if is_mirrored(held.variable)), None)


def scope(strategy: Any) -> AbstractContextManager[Any]:
    return nullcontext() if strategy is None else strategy.scope()


def on_one(function: Callable[[Any, Any], Any], strategy: Any) -> Callable[[Any, Any], Any]:
    """The function on the first device, which is enough to see what it does; as it is where there is no strategy."""
    if strategy is None:
        return function

    def run(batch: Any, seed: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(function, args=(batch, seed)))[0]

    return run


def tested(compute: Objective, strategy: Any) -> Callable[[Any, Any], Any]:
    """What validation shows of a batch."""

    def shown(batch: Any, seed: Any) -> Any:
        return packed(compute(batch, seed))

    return on_one(shown, strategy)


def training_step(
    job: Job, compute: Objective, trained: Sequence[Any], optimizer: Any, strategy: Any
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """(batch, seed) to (numbers, whether the loss is finite). Where it is not, no device updates its copy."""
    if optimizer is None:
        remedy = "pass optimizer=, and return the loss alone"
        raise OptimizerError(says(job, "an optimizer= for a module under a strategy", "none", remedy))
    devices = strategy.num_replicas_in_sync

    def slopes(batch: Any, seed: Any) -> Any:
        number = _number()
        part, share = _part(batch, number, devices)
        with tf.GradientTape() as tape:
            values = compute(part, seed + tf.constant([number, 0], tf.int64))
            loss = values["loss"] * tf.cast(share, values["loss"].dtype)
        pairs = gradients(tape, loss, trained)
        reached[:] = [variable for _, variable in pairs]
        found = [slope for slope, _ in pairs]
        if job.clip_norm is not None:
            context = tf.distribute.get_replica_context()
            assert context is not None
            whole = context.all_reduce(tf.distribute.ReduceOp.SUM, found)
            clipped, _ = tf.clip_by_global_norm(whole, job.clip_norm)
            found = [slope / devices for slope in clipped]  # the optimizer adds the devices' up again
        return packed(values) * tf.cast(share, tf.float64), found

    reached: list[Any] = []

    def update(found: Any) -> None:
        optimizer.apply_gradients(list(zip(found, reached, strict=True)))

    def step(batch: Any, seed: Any) -> tuple[Any, Any]:
        shown, found = strategy.run(slopes, args=(batch, seed))
        values = strategy.reduce(tf.distribute.ReduceOp.SUM, shown, axis=None)

        def apply() -> Any:
            strategy.run(update, args=(found,))
            return tf.constant(True)

        is_sound = tf.cond(tf.math.is_finite(values[0]), apply, lambda: tf.constant(False))
        return values, is_sound

    return step


def _number() -> int:
    context = tf.distribute.get_replica_context()
    assert context is not None
    return int(tf.get_static_value(context.replica_id_in_sync_group))  # type: ignore[arg-type]


def _part(batch: Any, number: int, devices: int) -> tuple[Any, Any]:
    """The samples of one device, and their share of the batch. Of fewer samples than devices each has all of them."""
    size = tf.nest.flatten(batch)[0].shape[0]
    if size is None:
        size = tf.shape(tf.nest.flatten(batch)[0])[0]
        first, last = number * size // devices, (number + 1) * size // devices
        return tf.nest.map_structure(lambda leaf: leaf[first:last], batch), (last - first) / size
    if size < devices:
        return batch, 1 / devices
    first, last = number * size // devices, (number + 1) * size // devices
    return tf.nest.map_structure(lambda leaf: leaf[first:last], batch), (last - first) / size
