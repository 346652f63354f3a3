"""How many threads a stack's step runs with on a CPU: one, where its operations are too small to be shared out.

Two threads that share a small operation wait for each other after it. On a machine that others use too, the one that is
waited for may not even be running: the demo's stacks took eight times as long with two threads as with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from carpool.adapters.torch.resident import Code

T = TypeVar("T")

_FLOP_US = 1 / 40e3  # of a product, by one core
_ELEMENT_US = 1 / 2e3  # of anything else, by one core
_OPERATION_US = 5.0  # to begin an operation
_SHARING_US = 20.0  # to hand an operation's parts out and to wait for all of them
_WORTH = 1.25  # how many times faster several threads must be

_costs_us: WeakKeyDictionary[GraphModule, list[float]] = WeakKeyDictionary()
"""Of each operation of traced steps that are remembered."""


class Threads:
    """The threads that torch has inside a session's turns; outside it has as many as before. 0: as many as ever."""

    def __init__(self, count: int = 0, alone: int = 0) -> None:
        """`alone` are those of a member's step by itself."""
        self.count, self.alone = count, alone
        self._others = torch.get_num_threads()

    @contextmanager
    def inside(self, beside: bool = False) -> Iterator[None]:
        """`beside` launches that keep every core busy: whoever shares an operation out would wait for a core."""
        self._others = torch.get_num_threads()
        if count := 1 if beside else self.count:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(self._others)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside a turn beside launches, once they are through: as many as without them."""
        own = torch.get_num_threads()
        torch.set_num_threads(self.count or self._others)
        try:
            yield
        finally:
            torch.set_num_threads(own)

    @contextmanager
    def of_one(self) -> Iterator[None]:
        """Inside, the threads of a member's step by itself."""
        own = torch.get_num_threads()
        if self.alone:
            torch.set_num_threads(self.alone)
        try:
            yield
        finally:
            torch.set_num_threads(own)

    def outside(self, function: Callable[[], T]) -> T:
        """Calls a function with the threads that torch has outside, from inside a turn."""
        own = torch.get_num_threads()
        torch.set_num_threads(self._others)
        try:
            return function()
        finally:
            torch.set_num_threads(own)

    @property
    def most(self) -> int:
        """The threads that torch has outside."""
        return self._others

    @property
    def note(self) -> str:
        """What there is to say of it."""
        if not 0 < self.count < self._others:
            return ""
        return f"on one of {self._others} threads, as its operations are too small to be shared out"


def chosen(traced: GraphModule, most: int, rows: int = 1) -> Threads:
    """All of them or one, by what the operations of a traced step of so many rows compute: the same choice on every run."""
    costs = _costs_us.get(traced)
    if costs is None:
        costs = [_cost_us(node) for node in traced.graph.nodes if node.op == "call_function"]
        _costs_us[traced] = costs
    each = [cost / rows for cost in costs]
    return Threads(*(0 if worth_sharing(us, most) else 1 for us in (costs, each)))


def chosen_of(code: Code, width: int, most: int) -> Threads:
    """The same for a step that was not traced for so many members, but for one."""
    each_us = code.flops * _FLOP_US / max(1, code.operators)
    costs = [[each_us * rows] * code.operators for rows in (width, 1)]
    return Threads(*(0 if worth_sharing(us, most) else 1 for us in costs))


def worth_sharing(costs_us: list[float], threads: int) -> bool:
    """Whether so many threads make operations that take one core so long clearly faster.

    >>> worth_sharing([500.0] * 10, threads=2), worth_sharing([50.0] * 10, threads=2), worth_sharing([], threads=2)
    (True, False, False)
    """
    alone = sum(cost + _OPERATION_US for cost in costs_us)
    saved = sum(max(0.0, cost * (1 - 1 / threads) - _SHARING_US) for cost in costs_us)
    return saved > 0 and alone > _WORTH * (alone - saved)


def _cost_us(node: Node) -> float:
    """What an operation of a traced step takes one core, about."""
    made = node.meta.get("val")
    elements = sum(one.numel() for one in _tensors(made))
    flops = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if flops is None:
        return elements * _ELEMENT_US
    args = torch.fx.map_arg(node.args, lambda given: given.meta.get("val"))
    kwargs = torch.fx.map_arg(node.kwargs, lambda given: given.meta.get("val"))
    try:
        return float(flops(*args, **kwargs, out_val=made)) * _FLOP_US
    except Exception:  # an operator whose count wants what a trace does not hold
        return elements * _ELEMENT_US


def _tensors(made: Any) -> list[torch.Tensor]:
    found = made if isinstance(made, tuple | list) else [made]
    return [one for one in found if isinstance(one, torch.Tensor)]
