"""A job's state: what its variables hold, on the host by name, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carpool.adapters.base import JobState
from carpool.adapters.tensorflow.build import Built
from carpool.adapters.tensorflow.held import Held
from carpool.planning.cursor import Cursor

_OTHERS = "state"


def state_of(built: Built, cursor: Cursor | None = None) -> JobState:
    return JobState(
        cursor or Cursor(),
        {held.name: held.read().numpy() for held in built.variables},
        {_OTHERS: {held.name: held.read().numpy() for held in built.others}},
    )


def write(built: Built, state: JobState) -> None:
    _write(built.variables, state.model)
    _write(built.others, state.optimizer[_OTHERS])


def _write(variables: tuple[Held, ...], values: Mapping[str, Any]) -> None:
    for held in variables:
        held.write(values[held.name])


class Remembered:
    """What a job's variables held at some moment, on their device."""

    def __init__(self, variables: tuple[Held, ...]) -> None:
        self._kept = [(held, held.read()) for held in variables]

    def put_back(self) -> None:
        for held, value in self._kept:
            held.write(value)
