"""A population's hyper-parameters: arrays by name, a number for each member, read and assigned between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.errors import OptionError, sentence

_KINDS: tuple[type, ...] = (bool, int, float)
"""Of Python's numbers; each holds those before it."""


class Hyper(Mapping[str, Any]):
    """Numbers by name, each an array (N,). Assigning other numbers compiles nothing: they are inputs of the step."""

    def __init__(self, given: Mapping[str, Any], width: int) -> None:
        self._width = width
        self._held = {name: self._column(name, value) for name, value in given.items()}

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._held:
            known = ", ".join(self._held) or "no hyper-parameter"
            raise OptionError(sentence(known, repr(name), "name it in hyper= when the population is made"))
        column, held = self._column(name, value), self._held[name]
        if _KINDS.index(_kind(column)) > _KINDS.index(_kind(held)):
            remedy = "pass numbers of that kind when the population is made"
            raise OptionError(sentence(f"{held.dtype} as {name}", str(column.dtype), remedy))
        self._held[name] = column.astype(held.dtype)

    def arrays(self) -> dict[str, Any]:
        return dict(self._held)

    def scalars(self) -> dict[str, Any]:
        """One member's, as a trace sees them: as weak as Python's own, so that a rate does not widen half precision."""
        return {name: _kind(column)() for name, column in self._held.items()}

    def keep(self, rows: np.ndarray) -> None:
        """Only these members go on."""
        self._width = len(rows)
        self._held = {name: column[rows] for name, column in self._held.items()}

    def _column(self, name: str, value: Any) -> Any:
        try:
            if isinstance(value, str):
                raise TypeError("text is no number")
            array = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            remedy = "write what is no number into the optimizer function"
            raise OptionError(
                sentence(f"numbers as hyper-parameter {name}", type(value).__name__, remedy)
            ) from error
        if array.shape not in ((), (self._width,)):
            expected = f"one number or {self._width} of them as hyper-parameter {name}"
            raise OptionError(sentence(expected, f"shape {array.shape}", "pass one for each member"))
        own = array.astype(jax.dtypes.canonicalize_dtype(_kind(array)))
        return jnp.broadcast_to(own, (self._width,))


def _kind(array: Any) -> type:
    if array.dtype == bool:
        return bool
    return int if jnp.issubdtype(array.dtype, jnp.integer) else float
