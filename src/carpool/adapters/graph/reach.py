"""What running some elements of a graph reaches: placeholders that nobody feeds, variables, operations that wait."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

from carpool.adapters.graph.names import operation_of

_VARIABLES = ("VariableV2", "Variable", "VarHandleOp")
_WAITS = (
    "Queue",
    "Iterator",
    "Barrier",
    "Stage",
    "Unstage",
    "Recv",
    "Send",
    "Collective",
    "Reader",
    "PyFunc",
)
"""Parts of the names of operations that wait for others, or end in other threads."""


def reached(elements: Iterable[Any], fed: Iterable[Any] = ()) -> list[tf.Operation]:
    """Every operation that is run for these elements; what is fed is not computed, nor what stands behind it."""
    cut = {tensor.name for tensor in fed}
    seen: dict[tf.Operation, None] = {}
    todo = [operation_of(one) for one in elements if getattr(one, "name", None) not in cut]
    while todo:
        operation = todo.pop()
        if operation in seen:
            continue
        seen[operation] = None
        todo += [tensor.op for tensor in operation.inputs if tensor.name not in cut]
        todo += operation.control_inputs
    return list(seen)


def unfed(operations: Iterable[tf.Operation], fed: Iterable[Any]) -> list[str]:
    """Names of placeholders among them that have no value."""
    named = {tensor.op.name for tensor in fed}
    return [one.name for one in operations if one.type == "Placeholder" and one.name not in named]


def waits(operations: Iterable[tf.Operation]) -> bool:
    """Whether one of them may wait for another thread: then a step must not be run by its caller alone."""
    return any(part in operation.type for operation in operations for part in _WAITS)


def updates(operations: Iterable[tf.Operation]) -> list[str]:
    """Names of those that are an optimizer's updates."""
    return [one.name for one in operations if "Apply" in one.type]


def changes(operations: Iterable[tf.Operation]) -> bool:
    """Whether one of them changes a variable."""
    return any(part in one.type for one in operations for part in ("Apply", "Assign", "Scatter"))


def variables_in(operations: Collection[tf.Operation]) -> set[str]:
    """Names of the variables among them."""
    return {one.name for one in operations if one.type in _VARIABLES}
