"""A step of a whole stack, traced and, on a GPU, captured: each launch is replays alone.

The positions of every batch of a launch lie in a table on the device, beside a count of the steps taken: a step reads its row of the
table and counts on, so nothing of it changes from one step to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from keras.src import tree
from keras.src.backend.torch.core import device_scope
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from carpool.adapters.keras.torch_constants import fold, holds, host_reads
from carpool.adapters.keras.torch_scope import batchable, on_the_device
from carpool.adapters.keras.torch_state import Layout, State
from carpool.adapters.keras.torch_step import Step, Values, depended, results, test_step, train_step
from carpool.adapters.torch.faking import faked
from carpool.adapters.torch.program import Program, Tensors, trace_only
from carpool.adapters.torch.tracing import graph_of
from carpool.kernels.refusal import Unstackable
from carpool.kernels.table import alone, batched_or_refused, stacked
from carpool.planning.cursor import MAX_CHUNK_STEPS

_TABLE_ENTRIES = 1 << 24
"""Positions that a table holds at most; a longer launch fills it several times."""


class Holding(Exception):
    """A step holds tensors that are no variables: it is one model's own, and cannot stand for others."""


class Runner:
    """A program bound to a stack and a pool of data, for batches of one size."""

    def __init__(self, state: State, model: Any, kind: str, pool: Any, size: int, key: Hashable) -> None:
        leaves = [leaf for leaf in tree.flatten(pool) if leaf is not None]
        device = str(next(iter(state.matrices.values())).device)
        self._state = state
        self.tensors = tensors(state.layout, state.matrices, leaves, size)
        self._table = self.tensors["order"]
        step = stack_step(model, state.layout, kind, pool, size, state.width, device)
        self._program = Program(step, [self.tensors], (key, kind), _finish)

    def capture(self, steps: int) -> None:
        """Captures what so many steps take. That runs a step, so the stack is put back."""
        before = {kind: matrix.clone() for kind, matrix in self._state.matrices.items()}
        self._program.capture(min(steps, len(self._table)))
        for kind, matrix in self._state.matrices.items():
            matrix.copy_(before[kind])

    def run(self, order: np.ndarray, active: np.ndarray, seeds: np.ndarray, first: np.ndarray) -> None:
        """Enqueues the steps of `order`, [rows, steps, batch]."""
        steps = order.shape[1]
        _upload(self.tensors["active"], active)
        _upload(self.tensors["seeds"], seeds)
        for start in range(0, steps, len(self._table)):
            part = order[:, start : start + len(self._table)]
            count = part.shape[1]
            if self._table.is_cuda and not self._program.captured(count):
                self.capture(count)
            _upload(self.tensors["first"], first + start)
            _upload(self._table[:count], np.ascontiguousarray(part.swapaxes(0, 1)))
            self.tensors["k"].zero_()
            self._program.run(count)


def tensors(layout: Layout, matrices: dict[str, Tensor], leaves: Sequence[Tensor], size: int) -> Tensors:
    """All that a stack's step reads and writes.

    A stack of several works on a copy, which is masked when it is written back. Variables are views, made here and not in the step.
    """
    first = next(iter(matrices.values()))
    width, device = len(first), first.device
    length = max(1, min(MAX_CHUNK_STEPS, _TABLE_ENTRIES // (width * size)))
    work = matrices if width == 1 else {kind: torch.zeros_like(one) for kind, one in matrices.items()}
    flat = [value for part in layout.values(work) for value in part]
    made = {f"value {number}": value[0] if width == 1 else value for number, value in enumerate(flat)}
    if width > 1:
        made |= {f"state {kind}": matrix for kind, matrix in matrices.items()}
        made |= {f"work {kind}": matrix for kind, matrix in work.items()}
    return made | {
        **{f"data {number}": leaf for number, leaf in enumerate(leaves)},
        "order": torch.zeros(length, width, size, dtype=torch.int32, device=device),
        "k": torch.zeros(1, dtype=torch.int64, device=device),
        "active": torch.zeros(width, dtype=torch.bool, device=device),
        "seeds": torch.zeros(width, dtype=torch.int64, device=device),
        "first": torch.zeros(width, dtype=torch.int64, device=device),
    }


def stack_step(
    model: Any, layout: Layout, kind: str, pool: Any, size: int, width: int, device: str
) -> Callable[[Tensors], None]:
    """A step of every row, as a function that writes its tensors; rows that are not active keep what they had."""

    def run(given: Tensors) -> None:
        leaves = _named(given, "data ")
        positions = given["order"].index_select(0, given["k"]).view(-1)
        lead = (size,) if width == 1 else (width, size)
        batches = iter(leaf.index_select(0, positions).view(*lead, *leaf.shape[1:]) for leaf in leaves)
        batch = tree.map_structure(lambda leaf: None if leaf is None else next(batches), pool)
        values = layout.packed(_named(given, "value "))
        steps = given["first"] + given["k"]
        with device_scope(device), on_the_device():
            if width == 1:  # the row that is asked for is the one that there is: no copy, no mask
                step = _member(model, kind, values, batch)
                with alone(given["seeds"][0], steps[0]):
                    step(values, batch)
            else:
                held, work = _named(given, "state "), _named(given, "work ")
                for one, own in zip(held, work, strict=True):
                    own.copy_(one)
                _vmapped(model, kind, values, batch, given["seeds"], steps)
                mask = given["active"][:, None]
                for one, own in zip(held, work, strict=True):
                    one.copy_(torch.where(mask, own, one))
        given["k"].add_(1)

    return run


def _named(given: Tensors, start: str) -> list[Tensor]:
    return [tensor for name, tensor in given.items() if name.startswith(start)]


def _vmapped(model: Any, kind: str, values: Values, batch: Any, seeds: Tensor, steps: Tensor) -> None:
    step = _member(model, kind, _first(values), _first(batch))
    places = tree.map_structure(lambda leaf: None if leaf is None else 0, batch)

    def member(values: Values, batch: Any, seed: Tensor, number: Tensor) -> Tensor:
        with batchable(), stacked(seed, number):
            return step(values, batch)

    with batched_or_refused():
        torch.vmap(member, in_dims=(0, places, 0, 0), randomness="error")(values, batch, seeds, steps)


def _member(model: Any, kind: str, values: Values, batch: Any) -> Step:
    if kind == "test":
        return test_step(model)
    return train_step(model, _used(model, values, batch))


def _used(model: Any, values: Values, batch: Any) -> tuple[bool, ...]:
    """Found on tensors without numbers, apart from the trace that is under way."""
    with disable_proxy_modes_tracing(), torch.enable_grad():
        fake = faked()

        def shaped(leaf: Any) -> Any:
            if leaf is None:
                return None
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)

        with fake, alone(0, 0):
            made: Any = tree.map_structure(shaped, (values, batch))
            return depended(model, *made)


def _first(nest: Any) -> Any:
    return tree.map_structure(lambda leaf: None if leaf is None else leaf[0], nest)


def reader(model: Any, layout: Layout, width: int, device: str) -> tuple[list[str], Callable[..., Tensor]]:
    """What the metrics say, traced: the names, and a function of the metrics' values that answers [names, rows]."""
    names: list[str] = []
    read = results(model)

    def rows(*metrics: Tensor) -> Tensor:
        def member(*own: Tensor) -> list[Tensor]:
            shown = read(list(own))
            names[:] = list(shown)
            return [torch.as_tensor(value, device=device).to(torch.float64) for value in shown.values()]

        with device_scope(device), on_the_device(), torch.no_grad():
            if width == 1:
                return torch.stack([value.reshape(1) for value in member(*(m[0] for m in metrics))])
            made = torch.vmap(member)(*metrics)
        return torch.stack([value.expand(width) for value in made])

    metrics = layout.values(layout.empty(width, device))[3]
    traced = graph_of(rows, *metrics)
    fold(traced)
    traced.recompile()
    return names, traced


def _finish(traced: GraphModule) -> None:
    if (found := host_reads(traced)) is not None:
        raise Unstackable(found)
    fold(traced)


def _alike(model: Any) -> Callable[[GraphModule], None]:
    """What a regularizer or a loss holds is said by its config, and the same in all models of a structure; a layer's may be adapted."""
    own = [
        part
        for layer in model._flatten_layers()
        for part in tree.flatten([v for v in vars(layer).values() if isinstance(v, Tensor | list | tuple)])
        if isinstance(part, Tensor)
    ]

    def finish(traced: GraphModule) -> None:
        if holds(traced, own):
            raise Holding("a layer of it holds tensors that are no variables")
        _finish(traced)

    return finish


def attempt(
    model: Any,
    width: int,
    samples: Any,
    shape: tuple[int, int],
    key: Hashable,
    device: str,
    is_shared: bool = True,
) -> None:
    """Traces a training step and remembers it; raises what tracing raises, and Holding for a step that others may not share.

    `samples` is a nest of placed arrays of one sample each, `shape` how many the pool will hold and how many a batch.
    """
    length, size = shape
    layout = Layout(model)
    step = stack_step(model, layout, "train", samples, size, width, device)
    with faked():  # nothing is allocated
        leaves = [
            torch.empty(length, *leaf.shape[1:], dtype=leaf.dtype, device=device)
            for leaf in tree.flatten(samples)
            if leaf is not None
        ]
        made = tensors(layout, layout.empty(width, device), leaves, size)
    trace_only(step, made, (key, "train"), _alike(model) if is_shared else _finish)


def _upload(target: Tensor, array: np.ndarray) -> None:
    source = torch.from_numpy(array)
    if target.is_cuda:
        target.copy_(source.pin_memory(), non_blocking=True)  # from other memory the copy would wait
    else:
        target.copy_(source)
