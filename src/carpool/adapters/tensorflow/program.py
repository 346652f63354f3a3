"""Many steps as one graph: a loop over batches around a job's traced step, and the loops of several jobs beside one another.

Each job has a loop of its own, also where several are in one function: what a row computes does not hang on its neighbours, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.adapters.tensorflow.build import Built
from carpool.adapters.tensorflow.seeds import seed_at, seed_word

HEAD = 3
"""Numbers before the sums in what a loop gives back: steps taken, samples, and whether every loss was finite."""


class Program:
    """A traced function with fixed shapes: it is never traced again."""

    def __init__(self, graph: Any, plain_reason: str | None = None) -> None:
        self._graph = graph
        self.plain_reason = plain_reason

    def __call__(self, *arguments: Any) -> list[np.ndarray]:
        """Runs, and waits."""
        return [found.numpy() for found in self._graph(*arguments)]


def training(
    rows: Sequence[tuple[Built, Sequence[Any]]], size: int | None, most: int, is_jit: bool
) -> Program:
    """(orders [rows, most, size], counts [rows], first steps [rows]) to a vector for each row; without a size, for any.

    A row is a job and its data on the device. One whose count is 0 does nothing.
    """
    steps = [(built, list(leaves), built.once(size), seed_word(built.job.seed)) for built, leaves in rows]

    def run(orders: Any, counts: Any, firsts: Any) -> list[Any]:
        samples = tf.shape(orders)[2]
        made = []
        for row, (built, leaves, once, word) in enumerate(steps):
            step = partial(_gathered, built.data, leaves, once, word, samples, orders[row], firsts[row])
            made.append(_looped(step, counts[row], len(built.names)))
        return made

    width = len(rows)
    graph = tf.function(run, autograph=False, jit_compile=True if is_jit else None).get_concrete_function(
        tf.TensorSpec((width, most, size), tf.int32),
        tf.TensorSpec((width,), tf.int32),
        tf.TensorSpec((width,), tf.int64),
    )
    return Program(graph)


def _gathered(
    data: Any, leaves: Any, once: Any, word: int, samples: Any, order: Any, first: Any, i: Any
) -> Any:
    """The i-th step of a launch: what the step shows, whether its loss is finite, and how many samples it had."""
    batch = data.gathered(leaves, order[i])
    return (*once(batch, seed_at(word, first + tf.cast(i, tf.int64))), samples)


def validation(built: Built, leaves: Sequence[Any], size: int | None) -> Program:
    """(first sample, batches, samples of each) to the sums over so many batches, in the order of the data; without a size, for any."""
    data, once = built.validation, built.tested(size)
    assert data is not None
    word = seed_word(built.job.seed)

    def run(first: Any, batches: Any, samples: Any) -> list[Any]:
        def step(i: Any) -> Any:
            positions = first + i * samples + tf.range(samples if size is None else size)
            return once(data.gathered(leaves, positions), seed_at(word, i)), tf.constant(True), samples

        return [_looped(step, batches, len(built.names))]

    whole = tf.TensorSpec((), tf.int32)
    return Program(tf.function(run, autograph=False).get_concrete_function(whole, whole, whole))


def piped(built: Built, iterator: Any, is_counted: bool) -> Program:
    """(iterator, count, first step) to the row's vector. Where nobody knows how long an epoch is, it also ends with the data."""
    once, word = built.once(), seed_word(built.job.seed)

    def stepped(batch: Any, seed: Any) -> Any:
        size = tf.shape(tf.nest.flatten(batch)[0])[0]
        return (*once(batch, seed), size)

    def run(source: Any, count: Any, first: Any) -> list[Any]:
        def known(i: Any) -> Any:
            return stepped(source.get_next(), seed_at(word, first + tf.cast(i, tf.int64)))

        if is_counted:
            return [_looped(known, count, len(built.names))]
        return [_until_it_ends(source, stepped, count, lambda i: seed_at(word, first + i), len(built.names))]

    specs = (tf.TensorSpec((), tf.int32), tf.TensorSpec((), tf.int64))
    return Program(tf.function(run, autograph=False).get_concrete_function(iterator, *specs))


def single(built: Built) -> Program:
    """(leaves of a batch, step) to the row's vector, for batches that come from Python."""
    once, word = built.once(), seed_word(built.job.seed)

    def run(batch: Any, step: Any) -> list[Any]:
        values, is_sound = once(batch, seed_at(word, step))
        size = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float64)
        kept = tf.where(is_sound, values * size, 0.0)
        return [_vector(tf.cast(is_sound, tf.int32), tf.cast(size, tf.int32), is_sound, kept)]

    spec, _ = once.structured_input_signature[0]
    step = tf.TensorSpec((), tf.int64)
    return Program(tf.function(run, autograph=False).get_concrete_function(spec, step))


def _looped(step: Callable[[Any], Any], count: Any, numbers: int) -> Any:
    """Takes `count` steps, or fewer where a loss is not finite."""

    def body(i: Any, taken: Any, samples: Any, _: Any, sums: Any) -> Any:
        values, is_sound, size = step(i)
        grown = tf.cast(is_sound, tf.int32)
        kept = tf.where(is_sound, values * tf.cast(size, tf.float64), 0.0)
        return i + 1, taken + grown, samples + grown * size, is_sound, sums + kept

    start = (tf.constant(0), tf.constant(0), tf.constant(0), tf.constant(True), tf.zeros(numbers, tf.float64))
    _, taken, samples, is_sound, sums = tf.while_loop(
        lambda i, *rest: (i < count) & rest[2], body, start, parallel_iterations=1
    )
    return _vector(taken, samples, is_sound, sums)


def _until_it_ends(
    source: Any, stepped: Callable[[Any, Any], Any], count: Any, seed: Callable[[Any], Any], numbers: int
) -> Any:
    """The same of data that ends when it ends; the last number says whether it did."""

    def body(i: Any, taken: Any, samples: Any, _: Any, sums: Any, __: Any) -> Any:
        found = source.get_next_as_optional()

        def go() -> Any:
            values, is_sound, size = stepped(found.get_value(), seed(tf.cast(i, tf.int64)))
            return values, is_sound, size, tf.constant(False)

        def end() -> Any:
            return tf.zeros(numbers, tf.float64), tf.constant(True), tf.constant(0), tf.constant(True)

        values, is_sound, size, has_ended = tf.cond(found.has_value(), go, end)
        grown = tf.cast(is_sound & ~has_ended, tf.int32)
        kept = tf.where(is_sound, values * tf.cast(size, tf.float64), 0.0)
        return i + 1, taken + grown, samples + grown * size, is_sound, sums + kept, has_ended

    start = (tf.constant(0), tf.constant(0), tf.constant(0), tf.constant(True))
    _, taken, samples, is_sound, sums, has_ended = tf.while_loop(
        lambda i, *rest: (i < count) & rest[2] & ~rest[4],
        body,
        (*start, tf.zeros(numbers, tf.float64), tf.constant(False)),
        parallel_iterations=1,
    )
    return tf.concat([_vector(taken, samples, is_sound, sums), [tf.cast(has_ended, tf.float64)]], 0)


def _vector(taken: Any, samples: Any, is_sound: Any, sums: Any) -> Any:
    return tf.concat([tf.stack([tf.cast(one, tf.float64) for one in (taken, samples, is_sound)]), sums], 0)
