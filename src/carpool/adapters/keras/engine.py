"""What one Keras backend does for a stack of members of one structure.

A stack is what the engine makes of the members' variables: a session knows it as one value that it hands back with every call. Rows are
members. A program is a run of training steps, or a pass over validation data, that is one launch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

Stacked = Any
Logs = Any
"""What a launch showed of each row; `Engine.read` waits for it."""


@dataclass(frozen=True)
class Feed:
    """What a launch reads: for each row and step the positions of a batch in `pool`.

    `pool` is a nest of placed arrays, as a Keras train_step takes its data; where members have data of their own, these lie end to end.
    `order` is int32, [rows, steps, batch]; where all rows read the same and the engine shares orders, [1, steps, batch].
    """

    pool: Any
    order: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Steps, and samples in a batch."""
        return self.order.shape[1], self.order.shape[2]


class Engine(ABC):
    """One backend, one structure, one device, for as long as a session is open."""

    @classmethod
    def devices(cls) -> tuple[str, ...]:
        """Those that are there, the one that "auto" means first."""
        return ("cpu",)

    @classmethod
    def refusal(cls, model: Any) -> str | None:
        """Why this model's step cannot be run by programs, or None. It then trains by its own `fit`."""
        return None

    @classmethod
    def stack_refusal(cls, models: Sequence[Any]) -> str | None:
        """Why these models of one signature cannot be stacked, or None."""
        return None

    @classmethod
    def trial(cls, models: Sequence[Any], batch: Any, length: int, key: Any) -> str | None:
        """Why a program for these models of one structure cannot be made, found by beginning one; None where that is known otherwise.

        `batch` is a nest of arrays, `length` how many samples their pool will hold, `key` names the structure.
        """
        return None

    @classmethod
    def is_full(cls, error: BaseException) -> bool:
        """Whether an error says that a device has no memory left."""
        return isinstance(error, MemoryError)

    @abstractmethod
    def __init__(self, models: Sequence[Any], device: str, key: Any, seeds: Sequence[int]) -> None:
        """`models` are built and compiled; `key` names their structure, for programs that are kept from run to run.

        `seeds` are the jobs' own, for a backend whose random numbers are keyed by them.
        """

    def turn(self) -> AbstractContextManager[object]:
        """What everything that is asked of the session happens in: its own stream, on a device that has streams."""
        return nullcontext()

    @abstractmethod
    def stack(self) -> Stacked:
        """The members' variables as they are. The models keep their own."""

    @abstractmethod
    def put(self, stacked: Stacked, row: int) -> None:
        """Writes the row into its model's variables."""

    def put_all(self, stacked: Stacked, rows: Sequence[int]) -> None:
        """`put` for many rows."""
        for row in rows:
            self.put(stacked, row)

    @abstractmethod
    def take(self, stacked: Stacked, row: int) -> Stacked:
        """The stack with the row as its model's variables are now; cheap where none of them changed since `put`."""

    @abstractmethod
    def place(self, array: np.ndarray) -> Any:
        """An array on the device."""

    @abstractmethod
    def prepare(self, stacked: Stacked, pool: Any, shapes: Sequence[tuple[int, int]]) -> None:
        """Begins to make training programs of these shapes (steps, samples in a batch), and does not wait for them."""

    @abstractmethod
    def train(
        self, stacked: Stacked, feed: Feed, active: np.ndarray, fresh: np.ndarray, first: np.ndarray
    ) -> tuple[Stacked, Logs]:
        """Enqueues the feed's steps. Rows that are not active stay as they are; the metrics of fresh rows begin anew.

        `first` is the number of the first step of each row, counted over the whole job.
        """

    shares_order: bool = False
    """Whether one order may stand for all rows. `is_order_shared` says that it will."""
    is_order_shared: bool = False

    takes_epochs: bool = False
    """Whether `train_epochs` is there: many epochs in one launch."""

    def prepare_epochs(
        self, stacked: Stacked, pool: Any, parts: Sequence[tuple[int, int]], most: int
    ) -> None:
        """Begins to make the program of `train_epochs` for epochs of these parts, at most so many at once."""
        raise NotImplementedError(f"{type(self).__name__} takes no epochs: see takes_epochs")

    def train_epochs(
        self, stacked: Stacked, pool: Any, orders: Sequence[np.ndarray], active: np.ndarray, most: int
    ) -> tuple[Stacked, Logs]:
        """Enqueues whole epochs: for each part of an epoch an order [rows, epochs, steps, batch]. Logs are [epochs, rows]."""
        raise NotImplementedError(f"{type(self).__name__} takes no epochs: see takes_epochs")

    @abstractmethod
    def test(self, stacked: Stacked, feeds: Sequence[Feed], active: np.ndarray) -> tuple[Stacked, Logs]:
        """Enqueues a pass over validation data: the feeds one after another."""

    @abstractmethod
    def ready(self, logs: Logs) -> bool:
        """Whether `read` would not wait."""

    @abstractmethod
    def read(self, logs: Logs) -> Mapping[str, np.ndarray]:
        """Each number that Keras would show, [rows]."""

    @abstractmethod
    def narrow(self, stacked: Stacked, rows: Sequence[int]) -> Stacked:
        """A stack of these rows alone; the engine's rows are these from now on."""

    def revert(self, row: int) -> None:
        """Gives the row's model back what it came with, where programs write into the models themselves."""
        return

    def step_alone(self, row: int, feed: Feed) -> Mapping[str, Any] | None:
        """The row's model's own first step, by Keras' ordinary way: trainable variables and logs after it. None where that says nothing.

        It leaves the model as it was.
        """
        return None

    def after_step(self, stacked: Stacked, row: int, logs: Logs) -> Mapping[str, Any]:
        """The same of a stack that took one step; an engine that has `step_alone` has this."""
        raise NotImplementedError(f"{type(self).__name__} steps no model alone")

    def close(self) -> None:
        """Gives every byte back."""
        return


Make = Callable[..., Engine]
