"""Variables by the handles that a trace captures: read and written whoever made them, and all copies of one that is mirrored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Held:
    """A variable under a name. A mirrored one has a handle on each of its devices."""

    name: str
    handles: tuple[Any, ...]
    dtype: tf.DType
    trainable: bool = False
    variable: Any = None
    """The user's own object, where it is known."""

    def read(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self.handles[0], dtype=self.dtype)

    def write(self, value: Any) -> None:
        """In a trace too, where there is nothing to place."""
        placed = tf.convert_to_tensor(value, self.dtype)
        for handle in self.handles:
            tf.raw_ops.AssignVariableOp(resource=handle, value=placed)

    @property
    def nbytes(self) -> int:
        shape = self.handles[0]._handle_data.shape_and_type[0].shape
        return int(np.prod([dim.size for dim in shape.dim], dtype=np.int64)) * self.dtype.size


def of_variables(named: Iterable[tuple[str, Any]]) -> tuple[Held, ...]:
    return tuple(
        Held(name, handles_of(variable), variable.dtype, bool(variable.trainable), variable)
        for name, variable in named
    )


def handles_of(variable: Any) -> tuple[Any, ...]:
    copies = getattr(variable, "values", None) if is_mirrored(variable) else None
    return tuple(one.handle for one in copies) if copies else (variable.handle,)


def is_mirrored(variable: Any) -> bool:
    return isinstance(variable, tf.distribute.DistributedValues)


def captured(functions: Sequence[Any], known: Iterable[Held]) -> tuple[Held, ...]:
    """What traced functions hold beside the variables that are known: slots, counters, states of random generators."""
    seen = {id(handle) for held in known for handle in held.handles}
    found: list[Held] = []
    for handle in _handles(functions):
        if id(handle) not in seen:
            seen.add(id(handle))
            kind = tf.DType(handle._handle_data.shape_and_type[0].dtype)
            found.append(Held(f"captured {len(found)}", (handle,), kind))
    return tuple(found)


def _handles(functions: Sequence[Any]) -> Iterator[Any]:
    """Handles of variables: those of iterators and tables say nothing of a type."""
    for function in functions:
        for tensor in function.captured_inputs:
            data = getattr(tensor, "_handle_data", None)
            if tensor.dtype == tf.resource and data is not None and data.is_set and data.shape_and_type:
                yield tensor
