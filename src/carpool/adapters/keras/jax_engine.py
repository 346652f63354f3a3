"""Keras on JAX: many steps of many members are one XLA program, Keras' own `train_step` under vmap and scan.

Programs are compiled ahead in threads, and kept for the process by structure and shapes: a second fit of the same models compiles
nothing. They hold no model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv

from carpool.adapters import xla
from carpool.adapters.jax.convolve import apart
from carpool.adapters.jax.devices import device_of, names
from carpool.adapters.jax.lift import traced
from carpool.adapters.jax.state import row_of
from carpool.adapters.jax.telling import names_of
from carpool.adapters.keras.engine import Engine, Feed
from carpool.adapters.keras.jax_program import chunk, epochs, steps_of
from carpool.environment import cores
from carpool.marks import Identity
from carpool.memory.maps import thin

_KEPT = 128
_SMALL_BYTES = (
    64 << 20
)  # of a model alone: twice that is nothing, and its arrays are taken and given as they are
_programs: OrderedDict[Asked, Future[Any]] = OrderedDict()
_own_programs: WeakKeyDictionary[Any, OrderedDict[Asked, Future[Any]]] = WeakKeyDictionary()
"""Of models whose structure is theirs alone: such programs go with their model."""
_CONVOLUTIONS = (BaseConv, BaseConvTranspose, BaseDepthwiseConv, BaseSeparableConv)


class Asked(NamedTuple):
    """What tells one program from another."""

    kind: str
    sizes: tuple[Any, ...]
    width: int
    structure: str
    shapes: tuple[Any, ...]
    models: Any
    """Their structure, or None where the program is kept with the one model it is of."""


class JaxEngine(Engine):
    takes_epochs = shares_order = True

    @classmethod
    def devices(cls) -> tuple[str, ...]:
        return names()

    @classmethod
    def refusal(cls, model: Any) -> str | None:
        if model.run_eagerly:
            return "it is compiled with run_eagerly=True"
        if not model.jit_compile:
            return "it is compiled with jit_compile=False"
        return None

    @classmethod
    def is_full(cls, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)

    def __init__(self, models: Sequence[Any], device: str, key: Any, seeds: Sequence[int]) -> None:
        self._models = list(models)
        self._template = self._models[0]
        self._key = (key, device)
        self._device = device_of(device)
        self._place = jax.sharding.SingleDeviceSharding(self._device)
        self._donates = len(models) > 1 or _bytes(self._template) > _SMALL_BYTES
        self._known: dict[int, list[Any]] = {}
        """Of each row what its model's variables held when they were last read or written."""
        self._starts = _starting_metrics(self._template)
        self._step_by_step = self._device.platform == "cpu" and _convolves(self._template)
        self.takes_epochs = not self._step_by_step
        self._mine: dict[Any, Future[Any]] = {}
        self._is_own = any(isinstance(value, Identity) for _, value in key)
        self._pool = ThreadPoolExecutor(max(1, cores()))

    # The stack

    def stack(self) -> Any:
        """By way of the host: one copy of each variable, whatever their number, instead of an operation for each."""
        rows = [_values(model) for model in self._models]
        for row, values in enumerate(rows):
            self._known[row] = [value for part in values for value in part]
        if self._width == 1:
            return jax.tree.map(self._own, rows[0])
        host = jax.device_get(rows)
        return self.place(jax.tree.map(lambda *leaves: np.stack(leaves), *host))

    def _own(self, value: Any) -> Any:
        """A variable's value as the stack of one holds it: the same array, unless programs write over what they are given."""
        placed = value if value.sharding == self._place else self.place(value)
        return jnp.copy(placed) if self._donates and placed is value else placed

    def put(self, stacked: Any, row: int) -> None:
        self.put_all(stacked, [row])

    def put_all(self, stacked: Any, rows: Sequence[int]) -> None:
        """A launch for each row, and a way over the host for variables that live elsewhere."""
        leaves = jax.tree.leaves(stacked)
        for row in rows:
            variables = [variable for part in _variables(self._models[row]) for variable in part]
            places = [variable.value.sharding for variable in variables]
            if self._width == 1:
                values = [self._given(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
            else:
                own = row_of(leaves, np.int32(row))
                values = own if all(place == self._place for place in places) else jax.device_put(own, places)
            for variable, value in zip(variables, values, strict=True):
                variable._direct_assign(value)
            self._known[row] = values

    def _given(self, leaf: Any, place: Any) -> Any:
        """The reverse of `_own`."""
        if leaf.sharding != place:
            return jax.device_put(leaf, place)
        return jnp.copy(leaf) if self._donates else leaf

    def take(self, stacked: Any, row: int) -> Any:
        known = iter(self._known[row])
        parts = []
        for part, values in zip(_variables(self._models[row]), stacked, strict=True):
            changed = [variable.value is not next(known) for variable in part]
            parts.append(
                [
                    self._with(value, row, variable.value) if is_changed else value
                    for variable, value, is_changed in zip(part, values, changed, strict=True)
                ]
            )
        self._known[row] = [v.value for part in _variables(self._models[row]) for v in part]
        return tuple(parts)

    def _with(self, stacked: Any, row: int, value: Any) -> Any:
        return self._own(value) if self._width == 1 else stacked.at[row].set(self.place(value))

    def narrow(self, stacked: Any, rows: Sequence[int]) -> Any:
        kept = jnp.asarray(list(rows))
        self._models = [self._models[row] for row in rows]
        self._known = {i: self._known[row] for i, row in enumerate(rows)}
        self._mine = {}
        if self._width == 1:
            return jax.tree.map(lambda leaf: leaf[kept[0]], stacked)
        return jax.tree.map(lambda leaf: leaf[kept], stacked)

    def place(self, array: Any) -> Any:
        return jax.device_put(array, self._device)

    # Programs

    def prepare(self, stacked: Any, pool: Any, shapes: Sequence[tuple[int, int]]) -> None:
        for steps, size in shapes:
            order = np.zeros((self._orders, steps, size), np.int32)
            self._program("train", stacked, self._launches(Feed(pool, order))[0])

    def train(
        self, stacked: Any, feed: Feed, active: np.ndarray, fresh: np.ndarray, first: np.ndarray
    ) -> Any:
        return self._run("train", stacked, [feed], active, fresh)

    def prepare_epochs(self, stacked: Any, pool: Any, parts: Sequence[tuple[int, int]], most: int) -> None:
        self._epochs_program(stacked, pool, parts, most)

    def train_epochs(
        self, stacked: Any, pool: Any, orders: Sequence[np.ndarray], active: np.ndarray, most: int
    ) -> Any:
        parts = [order.shape[2:] for order in orders]
        program = self._epochs_program(stacked, pool, parts, most).result()
        count = orders[0].shape[1]
        room = [(0, 0), (0, most - count), (0, 0), (0, 0)]
        return program(stacked, pool, [np.pad(order, room) for order in orders], active, np.int32(count))

    def test(self, stacked: Any, feeds: Sequence[Feed], active: np.ndarray) -> Any:
        return self._run("test", stacked, feeds, active, np.ones(self._width, bool))

    def _run(
        self, kind: str, stacked: Any, feeds: Sequence[Feed], active: np.ndarray, fresh: np.ndarray
    ) -> Any:
        logs = None
        for feed in feeds:
            for launch in self._launches(feed):
                program = self._program(kind, stacked, launch).result()
                stacked, logs = program(stacked, launch.pool, launch.order, active, fresh)
                fresh = np.zeros(self._width, bool)
        return stacked, logs

    def _launches(self, feed: Feed) -> list[Feed]:
        """One, or one for each step: XLA's convolutions on a CPU take several times as long inside a loop as outside of one."""
        if not self._step_by_step:
            return [feed]
        return [Feed(feed.pool, feed.order[:, step : step + 1]) for step in range(feed.shape[0])]

    def ready(self, logs: Any) -> bool:
        return all(leaf.is_ready() for leaf in jax.tree.leaves(logs))

    def read(self, logs: Any) -> Mapping[str, np.ndarray]:
        """What the last step showed, or what its metrics say where these are the same names: as Keras chooses."""
        shown, results = jax.device_get(logs)
        return results if shown is None or shown.keys() == results.keys() else shown

    def _program(self, kind: str, stacked: Any, feed: Feed) -> Future[Any]:
        """Of one chunk, or of one pass over part of the validation data."""
        flags = np.zeros(self._width, bool)
        inputs = (stacked, feed.pool, feed.order, flags, flags)

        def make() -> Any:
            step = self._train_step if kind == "train" else self._test_step
            shows = not _shows_metrics(self._template, f"{kind}_step")
            return chunk(steps_of(step, shows), self._starts, self._results, self._width)

        return self._kept(kind, feed.order.shape, inputs, make)

    def _epochs_program(
        self, stacked: Any, pool: Any, parts: Sequence[tuple[int, int]], most: int
    ) -> Future[Any]:
        orders = [np.zeros((self._orders, most, *part), np.int32) for part in parts]
        inputs = (stacked, pool, orders, np.zeros(self._width, bool), np.int32(0))

        def make() -> Any:
            shows = not _shows_metrics(self._template, "train_step")
            steps = steps_of(self._train_step, shows)
            return epochs(steps, self._starts, self._results, self._width, most, shows)

        return self._kept("epochs", (most, self._orders, *map(tuple, parts)), inputs, make)

    def _kept(self, kind: str, sizes: tuple[Any, ...], inputs: Any, make: Any) -> Future[Any]:
        """The program of this kind and these sizes, from this session, from the process, or made now."""
        if (kind, sizes) in self._mine:
            return self._mine[kind, sizes]
        leaves, structure = jax.tree.flatten(inputs)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        models = None if self._is_own else self._key
        key = Asked(kind, sizes, self._width, str(structure), shapes, models)
        kept = _own_programs.setdefault(self._template, OrderedDict()) if self._is_own else _programs
        if key not in kept:
            lowered = jax.jit(make(), donate_argnums=(0,) if self._donates else ()).lower(*inputs)
            kept[key] = self._pool.submit(xla.compiled, lowered, self._device.platform)
            thin(kept, _KEPT)
        kept.move_to_end(key)
        self._mine[kind, sizes] = kept[key]
        return kept[key]

    @property
    def _width(self) -> int:
        return len(self._models)

    @property
    def _orders(self) -> int:
        return 1 if self.is_order_shared else self._width

    def _train_step(self, state: Any, batch: Any) -> Any:
        logs, state = self._taken(self._template.train_step, state, batch)
        return (None if _shows_metrics(self._template, "train_step") else logs), state

    def _test_step(self, state: Any, batch: Any) -> Any:
        trainable, others, optimizer, metrics = state
        logs, (trainable, others, metrics) = self._taken(
            self._template.test_step, (trainable, others, metrics), batch
        )
        shown = None if _shows_metrics(self._template, "test_step") else logs
        return shown, (trainable, others, optimizer, metrics)

    def _taken(self, step: Any, state: Any, batch: Any) -> Any:
        """One of Keras' steps; on a CPU its convolutions are such as keep the members of a stack apart."""
        if self._width > 1 and self._device.platform == "cpu":
            found = traced(step, state, batch)
            if "conv_general_dilated" in names_of(found.closed):
                return found.run((state, batch), {}, {"conv_general_dilated": apart})
        return step(state, batch)

    def _results(self, metrics: Sequence[Any]) -> dict[str, Any]:
        mapping = list(zip(self._template.metrics_variables, metrics, strict=True))
        with StatelessScope(state_mapping=mapping):
            return self._template.get_metrics_result()

    # The check

    def step_alone(self, row: int, feed: Feed) -> Mapping[str, Any]:
        model = self._models[row]
        positions = feed.order[row if len(feed.order) > 1 else 0, 0]
        batch = jax.tree.map(lambda leaf: leaf[positions], feed.pool)
        state = tuple([self.place(variable.value) for variable in part] for part in _variables(model))
        state = (*state[:3], [self.place(value) for value in self._starts])
        _, after = jax.jit(model.train_step)(state, batch)
        return {
            variable.path: np.asarray(value)
            for variable, value in zip(_variables(model)[0], after[0], strict=True)
        }

    def after_step(self, stacked: Any, row: int, logs: Any) -> Mapping[str, Any]:
        model = self._models[row]
        return {
            variable.path: np.asarray(value if self._width == 1 else value[row])
            for variable, value in zip(_variables(model)[0], stacked[0], strict=True)
        }

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def _variables(model: Any) -> tuple[list[Any], ...]:
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def _values(model: Any) -> tuple[list[Any], ...]:
    return tuple([variable.value for variable in part] for part in _variables(model))


def _bytes(model: Any) -> int:
    return sum(value.nbytes for part in _values(model) for value in part)


def _starting_metrics(model: Any) -> list[np.ndarray]:
    """What the metrics' variables hold after `reset_metrics`, which touches no variable here."""
    with StatelessScope(state_mapping=[(v, v.value) for v in model.metrics_variables]) as scope:
        model.reset_metrics()
    values = [scope.get_current_value(variable) for variable in model.metrics_variables]
    return [
        np.asarray(variable.value if value is None else value)
        for variable, value in zip(model.metrics_variables, values, strict=True)
    ]


def _convolves(model: Any) -> bool:
    return any(isinstance(layer, _CONVOLUTIONS) for layer in model._flatten_layers())


def _shows_metrics(model: Any, step: str) -> bool:
    """Whether what a step shows is what its metrics say, so that one look after the last step is enough."""
    kind = type(model)
    return (
        getattr(kind, step) is getattr(keras.Model, step)
        and kind.compute_metrics is keras.Model.compute_metrics
    )
