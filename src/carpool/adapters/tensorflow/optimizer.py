"""A job's optimizer: recognised, made where a factory is given, and all its variables there before the first step is traced."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from carpool.adapters.tensorflow.held import Held, of_variables
from carpool.adapters.tensorflow.says import says
from carpool.errors import OptimizerError, described
from carpool.job import Job


def build_optimizer(job: Job, trained: Sequence[Any], strategy: Any = None) -> Any:
    """The optimizer with its slots; None where the job's step updates its variables itself."""
    if job.optimizer is None:
        if job.step is None:
            remedy = "pass optimizer=, such as keras.optimizers.Adam(1e-3)"
            raise OptimizerError(says(job, "an optimizer beside loss=", "none", remedy))
        return None
    with _scope(strategy):
        made = job.optimizer if is_optimizer(job.optimizer) else _made(job)
        _check_backend(job, made)
        _make_slots(job, made, trained, strategy)
    return made


def is_optimizer(thing: Any) -> bool:
    return hasattr(thing, "apply_gradients") and not isinstance(thing, type)


def is_keras(optimizer: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(optimizer, keras.optimizers.Optimizer)


def slots(optimizer: Any) -> tuple[Held, ...]:
    """The variables of a Keras optimizer, by their places: it names them after itself, and each is another. Others tell by what they capture."""
    if not is_keras(optimizer):
        return ()
    return of_variables((f"{place}", one.value) for place, one in enumerate(optimizer.variables))


def _scope(strategy: Any) -> AbstractContextManager[Any]:
    return nullcontext() if strategy is None else strategy.scope()


def _made(job: Job) -> Any:
    if not callable(job.optimizer):
        raise OptimizerError(
            says(
                job,
                "an object with apply_gradients, or a factory of one",
                type(job.optimizer).__name__,
                "pass keras.optimizers.Adam(1e-3), or a function that makes one",
            )
        )
    made = job.optimizer()
    if not is_optimizer(made):
        received = f"a factory of {type(made).__name__}"
        remedy = "return an optimizer, such as keras.optimizers.Adam(1e-3)"
        raise OptimizerError(says(job, "a factory of an object with apply_gradients", received, remedy))
    return made


def _check_backend(job: Job, optimizer: Any) -> None:
    if is_keras(optimizer) and (backend := sys.modules["keras"].backend.backend()) != "tensorflow":
        raise OptimizerError(
            says(
                job,
                "a Keras optimizer on the TensorFlow backend",
                f"one on {backend}",
                'set KERAS_BACKEND="tensorflow" before Keras is imported, or use tf.compat.v1.train',
            )
        )


def _make_slots(job: Job, optimizer: Any, trained: Sequence[Any], strategy: Any) -> None:
    """Traces an update that is never run: what it creates is there, with its first values."""
    if is_keras(optimizer):
        if not optimizer.built:
            optimizer.build(list(trained))
        return

    def update() -> None:
        optimizer.apply_gradients([(tf.zeros_like(variable), variable) for variable in trained])

    def run() -> None:
        update() if strategy is None else strategy.run(update)

    try:
        tf.function(run, autograph=False).get_concrete_function()
    except Exception as error:
        remedy = "apply_gradients takes (gradient, variable) pairs and may only call TensorFlow"
        raise OptimizerError(
            says(job, "apply_gradients that can be traced", described(error), remedy)
        ) from error
