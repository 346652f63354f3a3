"""A job's step as functions of (batch, seed): what it shows of a batch, its training step, its validation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from carpool.adapters.tensorflow.held import Held
from carpool.adapters.tensorflow.own import owned
from carpool.adapters.tensorflow.says import says
from carpool.errors import LossError
from carpool.job import Job, check_names

Objective = Callable[[Any, Any], dict[str, Any]]
"""From a batch and a seed to scalars by name, "loss" among them."""


def objective(job: Job, model: Any, training: bool) -> Objective:
    if job.step is not None:
        step = owned(job.step)
        known = words(job.step)

        def stepped(batch: Any, seed: Any) -> dict[str, Any]:
            return scalars(job, step(model, batch, **_given(known, seed, training)))

        return stepped
    loss = job.loss
    assert loss is not None
    known = words(type(model).__call__)

    def lossed(batch: Any, seed: Any) -> dict[str, Any]:
        x, y = batch
        prediction = model(x, **_given(known, seed, training))
        made = {"loss": loss(prediction, y)}
        return scalars(
            job, made | {name: metric(prediction, y) for name, metric in (job.metrics or {}).items()}
        )

    return lossed


def words(function: Any) -> frozenset[str]:
    """The names of a function's parameters."""
    try:
        return frozenset(inspect.signature(getattr(function, "python_function", function)).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _given(known: frozenset[str], seed: Any, training: bool) -> dict[str, Any]:
    """What a step or a model is given beside its batch, as far as it has a word for it."""
    given: dict[str, Any] = {word: seed for word in ("seed", "key") if word in known}
    return given | {word: training for word in ("training", "train", "is_training") if word in known}


def scalars(job: Job, made: Any) -> dict[str, Any]:
    """What a step returned, as numbers by name, the loss first."""
    values = dict(made) if isinstance(made, dict) else {"loss": made}
    check_names(job, values)
    if "loss" not in values:
        received = ", ".join(map(str, values)) or "an empty dict"
        raise LossError(says(job, 'step to return a loss or a dict with "loss"', received, 'add "loss"'))
    found: dict[str, Any] = {}
    for name, value in {"loss": values["loss"], **values}.items():
        try:
            tensor = tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            received = f"{name} is a {type(value).__name__}"
            raise LossError(says(job, f"{name} to be a number", received, "return a scalar tensor")) from None
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
            received = f"{name} is of {tensor.dtype.name}"
            raise LossError(says(job, f"{name} to be a number", received, "return a scalar tensor"))
        if tensor.shape.rank != 0:
            received, remedy = f"shape {tensor.shape}", "reduce it, with tf.reduce_mean say"
            raise LossError(says(job, f"{name} to be a scalar", received, remedy))
        found[str(name)] = tensor
    return found


def packed(values: dict[str, Any]) -> Any:
    """The numbers in one vector, in an order that is the step's own."""
    return tf.stack([tf.cast(value, tf.float64) for value in values.values()])


def training_step(
    compute: Objective, trained: Sequence[Any], rest: Sequence[Held], optimizer: Any, clip_norm: float | None
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """(batch, seed) to (numbers, whether the loss is finite). A step whose loss is not leaves every variable as it was."""

    def step(batch: Any, seed: Any) -> tuple[Any, Any]:
        before = [held.read() for held in rest]
        with tf.GradientTape() as tape:
            values = compute(batch, seed)
        pairs = gradients(tape, values["loss"], trained)

        def apply() -> Any:
            optimizer.apply_gradients(clipped(pairs, clip_norm))
            return tf.constant(True)

        def undo() -> Any:
            for held, value in zip(rest, before, strict=True):
                held.write(value)
            return tf.constant(False)

        is_sound = tf.cond(tf.math.is_finite(values["loss"]), apply, undo)
        return packed(values), is_sound

    return step


def own_step(compute: Objective) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The same of a step that updates its variables itself."""

    def step(batch: Any, seed: Any) -> tuple[Any, Any]:
        values = compute(batch, seed)
        return packed(values), tf.math.is_finite(values["loss"])

    return step


def gradients(tape: tf.GradientTape, loss: Any, trained: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Of the variables that the loss depends on."""
    found = tape.gradient(loss, list(trained))
    return [(slope, variable) for slope, variable in zip(found, trained, strict=True) if slope is not None]


def clipped(pairs: Sequence[tuple[Any, Any]], norm: float | None) -> list[tuple[Any, Any]]:
    if norm is None:
        return list(pairs)
    slopes, _ = tf.clip_by_global_norm([slope for slope, _ in pairs], norm)
    return list(zip(slopes, [variable for _, variable in pairs], strict=True))
