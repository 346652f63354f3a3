"""Keras on torch: many steps of many members, as Keras' own parts under vmap, traced once and on a GPU captured in CUDA graphs.

Traces are kept for the process by structure and shapes, and hold no model; a second fit of the same models traces nothing. Random
numbers are keyed by job, step and call (`torch_scope.py`), so a job ends in a stack where it ends alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
from keras.src import tree
from keras.src.backend.torch.core import convert_to_tensor, device_scope, get_device

from carpool.adapters.keras.engine import Engine, Feed
from carpool.adapters.keras.torch_program import Holding, Runner, attempt, reader
from carpool.adapters.keras.torch_scope import on_the_device
from carpool.adapters.keras.torch_state import Layout, State
from carpool.adapters.keras.torch_step import starting_metrics, variables
from carpool.adapters.torch.blame import blame
from carpool.adapters.torch.clock import Receipt, Stream
from carpool.errors import failure
from carpool.kernels.table import alone
from carpool.marks import Identity

_KEPT = 256
_ROUNDING = 1e-5  # of the largest gradient
_refusals: OrderedDict[Hashable, str | None] = OrderedDict()
_holding: set[Hashable] = set()
"""Structures whose steps hold tensors that are no variables."""
_readers: OrderedDict[Hashable, Any] = OrderedDict()


@dataclass(frozen=True)
class Shown:
    """What the metrics said after a launch, on its way to the host."""

    names: Sequence[str]
    receipt: Receipt


class TorchEngine(Engine):
    @classmethod
    def devices(cls) -> tuple[str, ...]:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        own = _device(str(get_device()))
        found = [f"cuda:{number}" for number in range(count)]
        first = [own] if own in found else []
        return tuple(dict.fromkeys([*first, *found, "cpu"]))

    @classmethod
    def refusal(cls, model: Any) -> str | None:
        if model.run_eagerly:
            return "it is compiled with run_eagerly=True"
        for name in ("train_step", "test_step", "compute_metrics"):
            if getattr(type(model), name) is not getattr(keras.Model, name):
                return f"its {name} is its own, and acts on its variables at once on the torch backend"
        return None

    @classmethod
    def trial(cls, models: Sequence[Any], batch: Any, length: int, key: Any) -> str | None:
        place, width = _device(str(get_device())), len(models)
        leaves = tuple(leaf.shape[:1] for leaf in tree.flatten(batch) if leaf is not None)
        found = (key, place, width, leaves)
        if found not in _refusals:
            _refusals[found] = _tried(models, batch, length, (key, place), place)
        while len(_refusals) > _KEPT:
            _refusals.popitem(last=False)
        return _refusals[found]

    @classmethod
    def is_full(cls, error: BaseException) -> bool:
        return isinstance(error, MemoryError | torch.OutOfMemoryError)

    def __init__(self, models: Sequence[Any], device: str, key: Any, seeds: Sequence[int]) -> None:
        self._models = list(models)
        self._device = device
        self._key = _own_key((key, device), self._models[0])
        self._seeds = np.asarray(seeds, np.int64)
        self._layout = Layout(self._models[0])
        self._stream = Stream(device)
        self._known: dict[int, list[tuple[int, int]]] = {}
        """Of each row which tensors its model's variables held, and how often they had been written, when last read or written."""
        self._held: dict[int, tuple[State, int]] = {}
        """Of each row which stack, after how many launches, its model holds."""
        self._telling: list[torch.Tensor] = []
        with self.turn(), device_scope(device):
            self._starts = [self._placed(start) for start in starting_metrics(self._models[0])]

    def turn(self) -> AbstractContextManager[object]:
        return self._stream.turn()

    # The stack

    def stack(self) -> State:
        with self.turn():
            state = State(self._layout, self._layout.empty(len(self._models), self._device))
            for row in range(len(self._models)):
                _copied(state.row(row), self._tensors(row))
                self._note(state, row)
        return state

    def _tensors(self, row: int) -> list[torch.Tensor]:
        return [variable.value.detach() for part in variables(self._models[row]) for variable in part]

    def _note(self, state: State, row: int) -> None:
        held = [variable.value for part in variables(self._models[row]) for variable in part]
        self._known[row] = [(id(value), value._version) for value in held]
        self._held[row] = (state, state.changes)

    def _changed(self, row: int) -> list[bool]:
        held = [variable.value for part in variables(self._models[row]) for variable in part]
        return [
            (id(value), value._version) != known for value, known in zip(held, self._known[row], strict=True)
        ]

    def put(self, stacked: State, row: int) -> None:
        if self._held.get(row) == (stacked, stacked.changes) and not any(self._changed(row)):
            return
        with self.turn():
            _copied(self._tensors(row), stacked.row(row))
        self._note(stacked, row)

    def take(self, stacked: State, row: int) -> State:
        changed = self._changed(row)
        if any(changed):
            with self.turn():
                pairs = zip(stacked.row(row), self._tensors(row), changed, strict=True)
                for view, tensor, is_changed in pairs:
                    if is_changed:
                        view.copy_(tensor)
            self._note(stacked, row)
        return stacked

    def narrow(self, stacked: State, rows: Sequence[int]) -> State:
        self._models = [self._models[row] for row in rows]
        self._seeds = self._seeds[list(rows)]
        self._known = {i: self._known[row] for i, row in enumerate(rows)}
        self._held = {}
        with self.turn():
            return stacked.of(rows)

    def place(self, array: Any) -> torch.Tensor:
        with self.turn(), device_scope(self._device):
            return self._placed(array)

    def _placed(self, array: Any) -> torch.Tensor:
        return convert_to_tensor(array).detach()

    # Programs

    def prepare(self, stacked: State, pool: Any, shapes: Sequence[tuple[int, int]]) -> None:
        with self.turn():
            for steps, size in shapes:
                self._runner(stacked, "train", pool, size).capture(steps)

    def train(
        self, stacked: State, feed: Feed, active: np.ndarray, fresh: np.ndarray, first: np.ndarray
    ) -> tuple[State, Shown]:
        return self._run(stacked, "train", [feed], active, fresh & active, first)

    def test(self, stacked: State, feeds: Sequence[Feed], active: np.ndarray) -> tuple[State, Shown]:
        return self._run(stacked, "test", feeds, active, active, np.zeros(len(active), np.int64))

    def _run(
        self,
        state: State,
        kind: str,
        feeds: Sequence[Feed],
        active: np.ndarray,
        fresh: np.ndarray,
        first: np.ndarray,
    ) -> tuple[State, Shown]:
        with self.turn():
            if fresh.any():
                state.begin(self._starts, [int(row) for row in np.flatnonzero(fresh)])
            state.changes += 1
            for feed in feeds:
                runner = self._runner(state, kind, feed.pool, feed.shape[1])
                runner.run(feed.order, active, self._seeds, first)
            return state, self._shown(state)

    def _runner(self, state: State, kind: str, pool: Any, size: int) -> Runner:
        key = (kind, size, id(pool))
        if key not in state.programs:
            made = Runner(state, self._models[0], kind, pool, size, self._key)
            state.programs[key] = (made, pool)  # the pool is kept: its number may not be another's
        return state.programs[key][0]

    def _shown(self, state: State) -> Shown:
        key = (self._key, state.width)
        if key not in _readers:
            _readers[key] = reader(self._models[0], self._layout, state.width, self._device)
        while len(_readers) > _KEPT:
            _readers.popitem(last=False)
        names, read = _readers[key]
        return Shown(names, Receipt(read(*self._layout.values(state.matrices)[3])))

    def ready(self, logs: Shown) -> bool:
        return logs.receipt.done()

    def read(self, logs: Shown) -> Mapping[str, np.ndarray]:
        return dict(zip(logs.names, logs.receipt.read(), strict=True))

    # The check

    def step_alone(self, row: int, feed: Feed) -> Mapping[str, Any]:
        model = self._models[row]
        held = [variable for part in variables(model) for variable in part]
        home = held[0].value.device  # the model's own, which need not be the stack's
        with self.turn(), device_scope(_device(str(home))):
            positions = torch.from_numpy(feed.order[row, 0]).to(self._device)
            batch = tree.map_structure(
                lambda leaf: None if leaf is None else leaf.index_select(0, positions).to(home), feed.pool
            )
            before = [variable.value.detach().clone() for variable in held]
            try:
                model.reset_metrics()
                with on_the_device(), alone(int(self._seeds[row]), 0):
                    model.train_step(batch)
                trained = [variable.value for variable in variables(model)[0]]
                self._telling = _telling(trained)
                return _told(model, trained, self._telling)
            finally:
                model.zero_grad()
                _copied([variable.value.detach() for variable in held], before)

    def after_step(self, stacked: State, row: int, logs: Shown) -> Mapping[str, Any]:
        with self.turn():
            values = [place.of(stacked.matrices)[row] for place in self._layout.parts[0]]
            return _told(self._models[row], values, self._telling)

    def close(self) -> None:
        self._stream.close()


def _telling(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where a weight's gradient is more than rounding: Adam takes steps of one size, whatever the gradient is made of."""
    gradients = [torch.zeros_like(w) if w.grad is None else w.grad.detach().abs() for w in weights]
    most = max((float(g.max()) for g in gradients if g.numel()), default=0.0)
    return [(g >= _ROUNDING * most).cpu() for g in gradients]


def _told(
    model: Any, values: Sequence[torch.Tensor], telling: Sequence[torch.Tensor]
) -> dict[str, np.ndarray]:
    return {
        variable.path: (value.detach().float().cpu() * where).numpy()
        for variable, value, where in zip(variables(model)[0], values, telling, strict=True)
    }


def _tried(models: Sequence[Any], batch: Any, length: int, key: Hashable, device: str) -> str | None:
    with device_scope(device):
        placed = tree.map_structure(lambda leaf: None if leaf is None else convert_to_tensor(leaf[:1]), batch)
    size = next(len(leaf) for leaf in tree.flatten(batch) if leaf is not None)
    given = (models[0], len(models), placed, (length, size))
    try:
        try:
            attempt(*given, key, device)
        except Holding as error:
            if len(models) > 1:
                return str(error)
            _holding.add(key)
            attempt(*given, _own_key(key, models[0]), device, is_shared=False)
    except BaseException as error:
        failure(error)
        return blame(error)
    return None


def _own_key(key: Hashable, model: Any) -> Hashable:
    """The key of what a step is remembered by, which no other model has where the step holds tensors of its model's."""
    return (key, Identity(model)) if key in _holding else key


def _copied(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def _device(name: str) -> str:
    """With its number, as a device is called here."""
    if name.startswith("cuda") and ":" not in name:
        return f"cuda:{torch.cuda.current_device()}"
    return name
