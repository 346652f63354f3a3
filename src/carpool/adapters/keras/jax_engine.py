"""Keras on JAX: many steps of many members are one XLA program, Keras' own `train_step` under vmap and scan.

Programs are compiled ahead in threads, and kept for the process by structure and shapes: a second fit of the same models compiles
nothing. They hold no model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv

from carpool.adapters.keras.engine import Engine, Feed
from carpool.environment import cores

_KEPT = 128
_programs: OrderedDict[Any, Future[Any]] = OrderedDict()
_CONVOLUTIONS = (BaseConv, BaseConvTranspose, BaseDepthwiseConv, BaseSeparableConv)
_PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "rocm": "cuda", "cpu": "cpu", "tpu": "tpu"}


class JaxEngine(Engine):
    takes_epochs = shares_order = True

    @classmethod
    def devices(cls) -> tuple[str, ...]:
        first = [_name(device) for device in jax.devices()]
        return tuple(dict.fromkeys([*first, "cpu"]))

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
        self._device = _device(device)
        self._known: dict[int, list[Any]] = {}
        """Of each row what its model's variables held when they were last read or written."""
        self._starts = _starting_metrics(self._template)
        self._step_by_step = self._device.platform == "cpu" and _convolves(self._template)
        self.takes_epochs = not self._step_by_step
        self._mine: dict[Any, Future[Any]] = {}
        self._pool = ThreadPoolExecutor(max(1, cores()))

    # The stack

    def stack(self) -> Any:
        """By way of the host: one copy of each variable, whatever their number, instead of an operation for each."""
        rows = [_values(model) for model in self._models]
        for row, values in enumerate(rows):
            self._known[row] = [value for part in values for value in part]
        host = jax.device_get(rows)
        return self.place(jax.tree.map(lambda *leaves: np.stack(leaves), *host))

    def put(self, stacked: Any, row: int) -> None:
        self.put_all(stacked, [row])

    def put_all(self, stacked: Any, rows: Sequence[int]) -> None:
        """Likewise by way of the host."""
        host = jax.tree.leaves(jax.device_get(stacked))
        for row in rows:
            variables = [variable for part in _variables(self._models[row]) for variable in part]
            places = [variable.value.sharding for variable in variables]
            values = jax.device_put([leaf[row] for leaf in host], places)
            for variable, value in zip(variables, values, strict=True):
                variable._direct_assign(value)
            self._known[row] = values

    def take(self, stacked: Any, row: int) -> Any:
        known = iter(self._known[row])
        parts = []
        for part, values in zip(_variables(self._models[row]), stacked, strict=True):
            changed = [variable.value is not next(known) for variable in part]
            parts.append(
                [
                    value.at[row].set(self.place(variable.value)) if is_changed else value
                    for variable, value, is_changed in zip(part, values, changed, strict=True)
                ]
            )
        self._known[row] = [v.value for part in _variables(self._models[row]) for v in part]
        return tuple(parts)

    def narrow(self, stacked: Any, rows: Sequence[int]) -> Any:
        kept = jnp.asarray(list(rows))
        self._models = [self._models[row] for row in rows]
        self._known = {i: self._known[row] for i, row in enumerate(rows)}
        self._mine = {}
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
            return _chunk(_steps(step, shows), self._starts, self._results, self._width)

        return self._kept((kind, feed.order.shape), inputs, make)

    def _epochs_program(
        self, stacked: Any, pool: Any, parts: Sequence[tuple[int, int]], most: int
    ) -> Future[Any]:
        orders = [np.zeros((self._orders, most, *part), np.int32) for part in parts]
        inputs = (stacked, pool, orders, np.zeros(self._width, bool), np.int32(0))

        def make() -> Any:
            shows = not _shows_metrics(self._template, "train_step")
            steps = _steps(self._train_step, shows)
            return _epochs(steps, self._starts, self._results, self._width, most, shows)

        return self._kept(("epochs", most, self._orders, *map(tuple, parts)), inputs, make)

    def _kept(self, kind: Any, inputs: Any, make: Any) -> Future[Any]:
        """The program of this kind, from this session, from the process, or made now."""
        if kind in self._mine:
            return self._mine[kind]
        leaves, structure = jax.tree.flatten(inputs)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        key = (kind, *self._key, self._width, str(structure), shapes)
        if key not in _programs:
            lowered = jax.jit(make(), donate_argnums=0).lower(*inputs)
            _programs[key] = self._pool.submit(lowered.compile)
        _programs.move_to_end(key)
        while len(_programs) > _KEPT:
            _programs.popitem(last=False)
        self._mine[kind] = _programs[key]
        return _programs[key]

    @property
    def _width(self) -> int:
        return len(self._models)

    @property
    def _orders(self) -> int:
        return 1 if self.is_order_shared else self._width

    def _train_step(self, state: Any, batch: Any) -> Any:
        logs, state = self._template.train_step(state, batch)
        return (None if _shows_metrics(self._template, "train_step") else logs), state

    def _test_step(self, state: Any, batch: Any) -> Any:
        trainable, others, optimizer, metrics = state
        logs, (trainable, others, metrics) = self._template.test_step((trainable, others, metrics), batch)
        shown = None if _shows_metrics(self._template, "test_step") else logs
        return shown, (trainable, others, optimizer, metrics)

    def _results(self, metrics: Sequence[Any]) -> dict[str, Any]:
        mapping = list(zip(self._template.metrics_variables, metrics, strict=True))
        with StatelessScope(state_mapping=mapping):
            return self._template.get_metrics_result()

    # The check

    def step_alone(self, row: int, feed: Feed) -> Mapping[str, Any]:
        model = self._models[row]
        batch = jax.tree.map(lambda leaf: leaf[feed.order[row, 0]], feed.pool)
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
            variable.path: np.asarray(value[row])
            for variable, value in zip(_variables(model)[0], stacked[0], strict=True)
        }

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def _steps(step: Any, shows: bool) -> Any:
    """Many steps of one member. `shows`: a step shows more than its metrics say, and the last one's logs are wanted."""

    def run(state: Any, pool: Any, order: Any) -> Any:
        def advance(carried: Any, positions: Any) -> Any:
            logs, state = step(carried[0], jax.tree.map(lambda leaf: leaf[positions], pool))
            return (state, logs), None

        carried, left = (state, None), order
        if shows or len(order) == 1:  # a first step says what is carried on from step to step
            carried, left = advance(carried, order[0])[0], order[1:]
        return jax.lax.scan(advance, carried, left)[0] if len(left) else carried

    return run


def _begun(state: Any, starts: Sequence[Any], fresh: Any) -> Any:
    """The state with the metrics of a fresh member begun anew."""
    metrics = [
        jnp.where(fresh, start.astype(now.dtype), now) for start, now in zip(starts, state[3], strict=True)
    ]
    return (*state[:3], metrics)


def _chunk(steps: Any, starts: Sequence[Any], results: Any, width: int) -> Any:
    """Steps of every row; rows that are not active keep what they had."""

    def member(state: Any, pool: Any, order: Any, fresh: Any) -> Any:
        state, logs = steps(_begun(state, starts, fresh), pool, order)
        return state, (logs, results(state[3]))

    def run(state: Any, pool: Any, order: Any, active: Any, fresh: Any) -> Any:
        after, logs = _each(member, width, len(order), 0)(state, pool, order, fresh)
        return _where(active, after, state), logs

    return run


def _epochs(steps: Any, starts: Sequence[Any], results: Any, width: int, most: int, shows: bool) -> Any:
    """Whole epochs of every row, as many as `count` says: a loop on the device around those of an epoch's parts."""

    def epoch(state: Any, pool: Any, orders: Any) -> Any:
        state, logs = _begun(state, starts, True), None
        for order in orders:
            state, logs = steps(state, pool, order)
        return state, (logs, results(state[3]))

    def member(state: Any, pool: Any, orders: Any, count: Any) -> Any:
        if shows:
            empty = jax.eval_shape(epoch, state, pool, [order[0] for order in orders])[1]
        else:
            empty = (None, jax.eval_shape(results, state[3]))
        shown = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), empty)

        def advance(number: Any, carried: Any) -> Any:
            state, shown = carried
            state, logs = epoch(state, pool, [order[number] for order in orders])
            return state, jax.tree.map(lambda kept, log: kept.at[number].set(log), shown, logs)

        return jax.lax.fori_loop(0, count, advance, (state, shown))

    def run(state: Any, pool: Any, orders: Any, active: Any, count: Any) -> Any:
        after, logs = _each(member, width, len(orders[0]), None)(state, pool, orders, count)
        by_epoch = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), logs)
        return _where(active, after, state), by_epoch

    return run


def _each(member: Any, width: int, orders: int, last: int | None) -> Any:
    """A member's function of state, pool, order and one thing more, for every row. The pool is one for all; `orders` may be one for all, and `last` says
    whether the thing more is. A stack of one is not vmapped.
    """
    axes = (0, None, 0 if orders == width else None, last)
    if width > 1:

        def each(state: Any, pool: Any, order: Any, more: Any) -> Any:
            own = order if orders == width else jax.tree.map(lambda leaf: leaf[0], order)
            return jax.vmap(member, in_axes=axes)(state, pool, own, more)

        return each

    def alone(*inputs: Any) -> Any:
        own = [
            value if axis is None else jax.tree.map(lambda leaf: leaf[0], value)
            for value, axis in zip(inputs, axes, strict=True)
        ]
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], member(*own))

    return alone


def _where(active: Any, new: Any, old: Any) -> Any:
    def kept(after: Any, before: Any) -> Any:
        return jnp.where(active.reshape(-1, *[1] * (after.ndim - 1)), after, before)

    return jax.tree.map(kept, new, old)


def _variables(model: Any) -> tuple[list[Any], ...]:
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def _values(model: Any) -> tuple[list[Any], ...]:
    return tuple([variable.value for variable in part] for part in _variables(model))


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


def _name(device: Any) -> str:
    platform = _PLATFORMS.get(device.platform, device.platform)
    return "cpu" if platform == "cpu" else f"{platform}:{device.id}"


def _device(name: str) -> Any:
    platform, _, number = name.partition(":")
    return jax.devices({"cuda": "gpu"}.get(platform, platform))[int(number or 0)]
