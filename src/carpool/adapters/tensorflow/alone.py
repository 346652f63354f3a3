"""A job alone: a group of one that is no group, so that what it raises is its own failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.adapters.base import JobState, MetricRow, Session, Ticket
from carpool.adapters.tensorflow.session import RowsSession
from carpool.planning.cursor import Chunk


class Alone(Session):
    def __init__(self, inner: RowsSession) -> None:
        self._inner = inner

    def advance(self, chunk: Chunk) -> Ticket:
        return self._inner.advance(chunk)

    def done(self, ticket: Ticket) -> bool:
        return self._inner.done(ticket)

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        return self._inner.metrics(ticket)

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        return self._inner.evaluate(rows)

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        return

    def keep(self, rows: Sequence[int]) -> None:
        self._inner.keep(rows)

    def revert(self, rows: Sequence[int]) -> None:
        self._inner.revert(rows)

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        return self._inner.state(rows)

    def load(self, row: int, state: JobState) -> None:
        self._inner.load(row, state)

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        return self._inner.predict(inputs, rows)

    def close(self) -> None:
        self._inner.close()
