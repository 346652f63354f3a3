"""Keras on TensorFlow: many steps of a member are one graph around Keras' own `train_step`, and members run beside one another.

TensorFlow cannot stack models. The models' own variables are the truth, a stack is nothing but the models, and members of one structure
share their programs. A program is kept for as long as one of the models that it was made for lives. XLA compiles it where it compiles
the model's own steps (`model.jit_compile`), so that both round alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree

from carpool.adapters.keras.engine import Engine, Feed
from carpool.adapters.keras.tensorflow_program import Form, Program, handles, traced, variables
from carpool.environment import cores
from carpool.errors import DeviceError, failure, sentence
from carpool.marks import Identity

_MOST_THREADS = 16  # they wait rather than work: TensorFlow has its own that work
_LEAST_STEPS = 64  # programs take any number of steps up to their most: shorter launches share one
_of_models: weakref.WeakKeyDictionary[Any, dict[Any, Program]] = weakref.WeakKeyDictionary()
_of_structures: weakref.WeakValueDictionary[Any, Program] = weakref.WeakValueDictionary()


class TensorFlowEngine(Engine):
    @classmethod
    def devices(cls) -> tuple[str, ...]:
        found = [f"cuda:{i}" for i, _ in enumerate(tf.config.list_logical_devices("GPU"))]
        return (*found, "cpu")

    @classmethod
    def refusal(cls, model: Any) -> str | None:
        if model.run_eagerly:
            return "it is compiled with run_eagerly=True"
        for word in ("make_train_function", "make_test_function"):
            if getattr(type(model), word) is not getattr(keras.Model, word):
                return f"it has a {word} of its own"
        if model._distribute_strategy is not None or tf.distribute.has_strategy():
            return "a tf.distribute strategy spreads it over devices"
        return None

    @classmethod
    def is_full(cls, error: BaseException) -> bool:
        return isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)

    def __init__(self, models: Sequence[Any], device: str, key: Any, seeds: Sequence[int]) -> None:
        self._device = _device(device)
        self._key = (key, device)
        self._rows = [_Row(model) for model in models]
        self._threads = [ThreadPoolExecutor(1) for _ in range(min(len(models), _MOST_THREADS))]
        self._makers = ThreadPoolExecutor(cores())

    # The stack

    def stack(self) -> Any:
        return None

    def put(self, stacked: Any, row: int) -> None:
        """The model holds it, once what was enqueued is done."""
        self._rows[row].wait()

    def take(self, stacked: Any, row: int) -> Any:
        return stacked

    def narrow(self, stacked: Any, rows: Sequence[int]) -> Any:
        for row in self._rows:
            row.wait()
        self._rows = [self._rows[row] for row in rows]
        return stacked

    def revert(self, row: int) -> None:
        self._rows[row].revert()

    def place(self, array: np.ndarray) -> Any:
        with tf.device(self._device):
            return tf.identity(tf.constant(array))

    # Launches

    def prepare(self, stacked: Any, pool: Any, shapes: Sequence[tuple[int, int]]) -> None:
        """Traces. XLA compiles meanwhile. What goes wrong here goes wrong again where it is used, and is raised there."""
        try:
            for steps, size in shapes:
                for row in self._rows:
                    self._traced(row, Feed(pool, np.zeros((1, steps, size), np.int32)), "train")
        except BaseException as error:
            failure(error)
            return

    def train(
        self, stacked: Any, feed: Feed, active: np.ndarray, fresh: np.ndarray, first: np.ndarray
    ) -> Any:
        rows = [int(row) for row in np.flatnonzero(active)]
        return stacked, {row: self._launch(row, feed, "train", bool(fresh[row])) for row in rows}

    def test(self, stacked: Any, feeds: Sequence[Feed], active: np.ndarray) -> Any:
        logs: dict[int, Any] = {}
        for number, feed in enumerate(feeds):
            for row in np.flatnonzero(active):
                logs[int(row)] = self._launch(int(row), feed, "test", fresh=number == 0)
        return stacked, logs

    def _launch(self, number: int, feed: Feed, kind: str, fresh: bool) -> Any:
        row = self._rows[number]
        self._check_place(row)
        program = self._program(row, feed, kind)
        leaves = [leaf for leaf in tree.flatten(feed.pool) if leaf is not None]

        def run() -> Any:
            row.raise_error()
            try:
                with tf.device(self._device):
                    return program(row.handles, leaves, feed.order[number], fresh)
            except BaseException as error:
                failure(error)
                row.error = error
                raise

        row.last = self._threads[number % len(self._threads)].submit(run)
        return program.names, row.last

    def ready(self, logs: Any) -> bool:
        return all(shown.done() for _, shown in logs.values())

    def read(self, logs: Any) -> Mapping[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for row, (names, shown) in logs.items():
            for name, value in zip(names, shown.result(), strict=True):
                found.setdefault(name, np.full(len(self._rows), np.nan))[row] = value
        return found

    def _check_place(self, row: _Row) -> None:
        stray = next((one for one in row.handles if not one.device.endswith(self._device)), None)
        if stray is not None:
            raise DeviceError(
                sentence(
                    f"a model whose variables are on {self._device}",
                    f"some on {stray.device}",
                    "build it under tf.device(...), or leave device= out",
                )
            )

    # Programs

    def _program(self, row: _Row, feed: Feed, kind: str) -> Program:
        """One that can run; where XLA cannot compile it, a plain graph."""
        program = self._traced(row, feed, kind)
        reason = program.compiled.result() if program.compiled is not None else None
        if reason is None:
            return program
        plain = traced(row.model, feed.pool, _form(feed, kind), False, reason)
        self._keep(row, _form(feed, kind), plain)
        return plain

    def _traced(self, row: _Row, feed: Feed, kind: str) -> Program:
        form = _form(feed, kind)
        program = self._kept(row, form)
        if program is None:
            with tf.device(self._device):
                program = traced(row.model, feed.pool, form, bool(row.model.jit_compile))
            if program.is_jit:
                self._compile(program, row, feed)
        self._keep(row, form, program)
        return program

    def _compile(self, program: Program, row: _Row, feed: Feed) -> None:
        """Runs no step, which makes XLA compile: with variables of its own where it can, as it writes all of them back."""
        leaves = [leaf for leaf in tree.flatten(feed.pool) if leaf is not None]
        none = np.zeros((0, feed.shape[1]), np.int32)
        shapes = [(variable.shape, variable.dtype) for variable in variables(row.model)]

        def compile() -> str | None:
            try:
                with tf.device(self._device):
                    if not program.is_shared:
                        program(row.handles, leaves, none, fresh=False)
                        return None
                    others = [tf.Variable(tf.zeros(shape, dtype)) for shape, dtype in shapes]
                    program([other.handle for other in others], leaves, none, fresh=False)
            except tf.errors.ResourceExhaustedError:
                raise
            except BaseException as error:
                failure(error)
                return f"XLA cannot compile it: {str(error).strip().splitlines()[0]}"

        if program.is_shared:
            program.compiled = self._makers.submit(compile)
        else:
            row.wait()
            program.compiled = Future()
            program.compiled.set_result(compile())

    def _kept(self, row: _Row, form: Form) -> Program | None:
        own = _of_models.get(row.model, {}).get(self._own_key(row, form))
        if own is not None or not self._is_shareable(row):
            return own
        return _of_structures.get((self._key, form))

    def _keep(self, row: _Row, form: Form, program: Program) -> None:
        own = _of_models.setdefault(row.model, {})
        for stale in [key for key in own if key[0]() is None]:  # compiled anew since then
            del own[stale]
        own[self._own_key(row, form)] = program
        if program.is_shared and self._is_shareable(row):
            _of_structures[self._key, form] = program

    def _own_key(self, row: _Row, form: Form) -> Any:
        """Says how the model was compiled, and does not keep it alive."""
        return weakref.ref(row.model._compile_config), self._device, form

    def _is_shareable(self, row: _Row) -> bool:
        signature, _ = self._key
        return row.is_plain and not any(isinstance(value, Identity) for _, value in signature)

    def close(self) -> None:
        for thread in (*self._threads, self._makers):
            thread.shutdown()
        self._rows = []


class _Row:
    """A model, what it held when it came, and what of it is enqueued."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.handles = handles(model)
        self.last: Future[Any] | None = None
        self.error: BaseException | None = None
        self.is_plain = not any(_holds_tensors(layer) for layer in model._flatten_layers())
        with tf.device("CPU:0"):
            self._start = [tf.identity(variable._value) for variable in variables(model)]

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        if self.last is not None:
            self.last.result()

    def revert(self) -> None:
        if self.last is not None:
            self.last.exception()
        for variable, value in zip(variables(self.model), self._start, strict=True):
            variable._value.assign(value)


def _holds_tensors(layer: Any) -> bool:
    """Whether a trace takes numbers from it that no variable holds, as of an adapted Normalization."""
    return any(isinstance(value, tf.Tensor) for value in vars(layer).values())


def _form(feed: Feed, kind: str) -> Form:
    steps, size = feed.shape
    most = max(_LEAST_STEPS, 1 << (steps - 1).bit_length())
    leaves = [leaf for leaf in tree.flatten(feed.pool) if leaf is not None]
    nest = tree.map_structure(lambda leaf: None if leaf is None else 0, feed.pool)
    shapes = tuple((tuple(leaf.shape), leaf.dtype.name) for leaf in leaves)
    return Form(kind, shapes, str(nest), size, most)


def _device(name: str) -> str:
    kind, _, number = name.partition(":")
    return f"{'GPU' if kind == 'cuda' else 'CPU'}:{number or 0}"
