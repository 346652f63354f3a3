"""Whether XLA compiles a job's steps, and why not. A decision by the job alone: its numbers may not hang on its neighbours."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from carpool.adapters.tensorflow import trace
from carpool.adapters.tensorflow.arrays import Arrays
from carpool.adapters.tensorflow.build import SEED, Built
from carpool.errors import failure

WORTH_STEPS = 20_000
"""Compiling took 1 to 4 s a job and saved 60 to 130 µs a step of a small network on two busy cores (docs/performance.md)."""


def plain_reason(built: Built, compile: str | bool, place: str) -> str | None:
    """Why the job's steps run as a plain graph; None where XLA compiles them."""
    if compile is False:
        return "compile=False was asked for"
    if not isinstance(built.data, Arrays):
        return "XLA cannot read a stream"
    if built.strategy is not None:
        return "a tf.distribute strategy spreads them over devices"
    if compile == "auto" and (reason := _not_worth_it(built, place)) is not None:
        return reason
    return _refused(built)


def _not_worth_it(built: Built, place: str) -> str | None:
    assert isinstance(built.data, Arrays)
    steps = -(-built.data.length // built.job.batch_size) * built.job.epochs
    if steps < WORTH_STEPS:
        return f"{steps} steps are too few to pay for compiling"
    once = built.once(built.any_size)
    if trace.draws(once):
        return "they draw random numbers, and XLA would draw others"
    if place.startswith("CPU") and trace.convolves(once):
        return "TensorFlow's own convolutions are faster on a CPU"
    return None


def _refused(built: Built) -> str | None:
    """What XLA says to the step, as far as that can be known without compiling it."""
    assert isinstance(built.data, Arrays)
    batch = built.data.batch(built.first_size)

    def step(*given: Any) -> Any:
        return built.step(tf.nest.pack_sequence_as(batch, given[:-1]), given[-1])

    try:
        asked = tf.function(step, autograph=False, jit_compile=True)
        asked.experimental_get_compiler_ir(*tf.nest.flatten(batch), SEED)(stage="hlo")
    except BaseException as error:
        failure(error)
        return f"XLA cannot compile them: {str(error).strip().splitlines()[0][:160]}"
    return None
