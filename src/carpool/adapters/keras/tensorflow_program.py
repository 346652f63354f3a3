"""Many steps of one TensorFlow model as one graph, traced once for all models of its structure.

TensorFlow binds a graph to the variables that it was traced with. Here it is traced with stand-ins that hold no memory, and each call
says which model's variables are meant: models of one structure share the trace and, under XLA, the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable


@dataclass(frozen=True)
class Form:
    """The shapes that a program is made for: of the pool's leaves, of a batch, and the most steps of a launch."""

    kind: str
    leaves: tuple[tuple[tuple[int, ...], str], ...]
    nest: str
    size: int
    most: int


@dataclass(eq=False)
class Program:
    """A traced graph. `captures` are positions in `variables(model)`, or tensors that are none of these."""

    names: tuple[str, ...]
    """Of the numbers that a call gives back."""
    is_jit: bool
    captures: Sequence[Any]
    plain_reason: str | None
    """Why XLA was not asked though the model would have it, where that is so."""
    _graph: Any
    compiled: Future[str | None] | None = None
    """Of XLA's compiling: why it could not, or None."""

    @property
    def is_shared(self) -> bool:
        """Whether any model of the structure can be bound: nothing is captured but variables of the model."""
        return all(isinstance(one, int) for one in self.captures)

    def __call__(self, handles: Sequence[Any], leaves: Sequence[Any], order: np.ndarray, fresh: bool) -> Any:
        """Takes the order's steps with the variables behind the handles, and waits for what they show."""
        most = self._graph.structured_input_signature[0][1].shape[0]
        table = np.zeros((most, order.shape[1]), np.int32)
        table[: len(order)] = order
        arguments = [tf.constant(table), tf.constant(len(order), tf.int32), tf.constant(fresh)]
        bound = [handles[one] if isinstance(one, int) else one for one in self.captures]
        return [shown.numpy() for shown in self._graph._call_flat([*leaves, *arguments], bound)]


def variables(model: Any) -> list[Any]:
    """Every Keras variable that a step may read or write, in an order that is the structure's."""
    found = (*model.variables, *model.optimizer.variables, *model.metrics_variables)
    return list({id(variable): variable for variable in found}.values())


def handles(model: Any) -> list[Any]:
    return [variable._value.handle for variable in variables(model)]


def traced(model: Any, pool: Any, form: Form, is_jit: bool, plain_reason: str | None = None) -> Program:
    names: list[str] = []

    def run(leaves: list[Any], order: Any, count: Any, fresh: Any) -> list[Any]:
        held = iter(leaves)
        nest = tree.map_structure(lambda leaf: None if leaf is None else next(held), pool)
        tf.cond(fresh, lambda: _nothing(model.reset_metrics), _nothing)

        def batch(step: Any) -> Any:
            # As in `fit`, a trace does not know how many samples a batch has: where it does, Keras weighs some metrics by it.
            positions = tf.compat.v1.placeholder_with_default(order[step], [None])
            return tree.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, positions), nest)

        shown = _looped(model, form, batch, count)
        names.extend(shown)
        return list(shown.values())

    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in form.leaves]
    with _stand_ins(model) as known:
        graph = tf.function(run, autograph=False, jit_compile=is_jit).get_concrete_function(
            specs,
            tf.TensorSpec((form.most, form.size), tf.int32),
            tf.TensorSpec((), tf.int32),
            tf.TensorSpec((), tf.bool),
        )
    positions = {id(handle): position for position, handle in enumerate(known)}
    captures = tuple(positions.get(id(tensor), tensor) for tensor in graph.captured_inputs)
    return Program(tuple(names), is_jit, captures, plain_reason, graph)


def _looped(model: Any, form: Form, batch: Callable[[Any], Any], count: Any) -> Mapping[str, Any]:
    """The steps, and what Keras would show after the last."""
    step = getattr(model, f"{form.kind}_step")
    if _shows_metrics(model, f"{form.kind}_step"):

        def body(i: Any) -> Any:
            step(batch(i))
            return (i + 1,)

        tf.while_loop(lambda i: i < count, body, (tf.constant(0),), parallel_iterations=1)
        return _numbers(model.get_metrics_result())
    once = tf.function(step, autograph=False)  # traced before the loop, which must know what it carries
    logs = once.get_concrete_function(batch(tf.constant(0))).structured_outputs
    first = tree.map_structure(lambda shown: tf.zeros(shown.shape, shown.dtype), _numbers(logs))
    _, last = tf.while_loop(
        lambda i, _: i < count,
        lambda i, _: (i + 1, _numbers(once(batch(i)))),
        (tf.constant(0), first),
        parallel_iterations=1,
    )
    results = model.get_metrics_result()
    return _numbers(results) if set(results) == set(logs) else last


def _numbers(logs: Any) -> dict[str, Any]:
    """Logs as Keras flattens them. Raises for what is not a number: it then trains by its own `fit`."""
    found: dict[str, Any] = {}
    for name, value in sorted(dict(logs).items()):
        if isinstance(value, dict):
            found |= _numbers(value)
        else:
            found[name] = tf.convert_to_tensor(value)
            if found[name].shape.rank != 0:
                raise TypeError(f"{name!r} is no number but has the shape {found[name].shape}")
    return found


def _nothing(act: Callable[[], None] = lambda: None) -> Any:
    act()
    return tf.constant(0)


@contextmanager
def _stand_ins(model: Any) -> Iterator[list[Any]]:
    """Inside, the model's variables are others of the same shapes that were never given a value; their handles."""
    kept = [(variable, variable._value) for variable in variables(model)]
    made = [
        UninitializedVariable(shape=real.shape, dtype=real.dtype, trainable=real.trainable)
        for _, real in kept
    ]
    try:
        for (variable, real), stand_in in zip(kept, made, strict=True):
            stand_in._unique_id = real._unique_id  # by which optimizers know their variables
            variable._value = stand_in
        yield [stand_in.handle for stand_in in made]
    finally:
        for variable, real in kept:
            variable._value = real


def _shows_metrics(model: Any, step: str) -> bool:
    """Whether what a step shows is what its metrics say, so that one look after the last step is enough."""
    kind = type(model)
    return (
        getattr(kind, step) is getattr(keras.Model, step)
        and kind.compute_metrics is keras.Model.compute_metrics
    )
