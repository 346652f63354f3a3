"""A job whose data comes in batches: a `tf.data.Dataset` is read inside the loop, many steps a launch; other batches are a launch each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from carpool.adapters.base import JobState, MetricRow, Session, Ticket
from carpool.adapters.tensorflow import mirrored, program
from carpool.adapters.tensorflow.arrays import Store
from carpool.adapters.tensorflow.build import Built
from carpool.adapters.tensorflow.rows import Rows
from carpool.adapters.tensorflow.streams import Piped, Streamed
from carpool.errors import DataError, failure, sentence
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk, Supply


class StreamSession(Session):
    """What both kinds have in common."""

    def __init__(self, built: Built, store: Store, device: str) -> None:
        self._rows, self._built = Rows([built], store, device), built

    def done(self, ticket: Ticket) -> bool:
        return ticket.payload.done()

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        return (self._rows.metric_row(0, ticket.payload.result()[0]),)

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        return self._rows.evaluate(rows)

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        return

    def keep(self, rows: Sequence[int]) -> None:
        self._rows.keep(rows)

    def revert(self, rows: Sequence[int]) -> None:
        self._rows.revert(rows)

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        return self._rows.state(rows)

    def load(self, row: int, state: JobState) -> None:
        self._rows.load(row, state)

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        raise NotImplementedError("call the module")

    def close(self) -> None:
        self._rows.close()


class PipedSession(StreamSession):
    """A `tf.data.Dataset`, from its beginning in every epoch."""

    def __init__(self, built: Built, store: Store, device: str) -> None:
        super().__init__(built, store, device)
        assert isinstance(built.data, Piped)
        self._data = built.data
        self._iterator = iter(self._data.dataset)
        self._left = self._data.batches
        with tf.device(device), mirrored.scope(built.strategy):
            self._program = program.piped(built, self._iterator, self._data.batches is not None)

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        left = self._left if self._left is not None else MAX_CHUNK_STEPS + 1
        steps = min(left, MAX_CHUNK_STEPS)
        return dict.fromkeys(rows, Supply(max(1, self._data.size), steps, ends=steps == left))

    def advance(self, chunk: Chunk) -> Ticket:
        """Enqueues the steps; where only the data knows when it ends, waits to hear how many there were."""
        first = tf.constant(chunk.cursors[0].step, tf.int64)
        iterator = self._iterator
        future = self._rows.train(self._program, [chunk.steps], lambda steps: (iterator, steps[0], first))
        if self._left is not None:
            self._left -= chunk.steps
            if not self._left:
                self._begin_again()
            return Ticket(Chunk(chunk.rows, chunk.cursors, chunk.size, chunk.steps, chunk.ends), future)
        vector = future.result()[0]
        has_ended, taken = bool(vector[-1]), int(vector[0])
        if has_ended:
            if chunk.cursors[0].batch + taken == 0:
                remedy = "pass a dataset that can be read again and again"
                raise DataError(
                    sentence("at least one batch an epoch", f"none in epoch {chunk.cursors[0].epoch}", remedy)
                )
            self._begin_again()
        ends = (0,) if has_ended else ()
        return Ticket(Chunk(chunk.rows, chunk.cursors, chunk.size, taken, ends), future)

    def _begin_again(self) -> None:
        """A launch that is enqueued holds the iterator that it was given."""
        self._iterator = iter(self._data.dataset)
        self._left = self._data.batches

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        vector = ticket.payload.result()[0]
        return (self._rows.metric_row(0, vector if self._data.batches is not None else vector[:-1]),)


class BatchSession(StreamSession):
    """Batches that Python makes, read ahead in the background."""

    def __init__(self, built: Built, store: Store, device: str) -> None:
        super().__init__(built, store, device)
        assert isinstance(built.data, Streamed)
        self._tap = built.data.source.tap(built.job.epochs)
        with tf.device(device), mirrored.scope(built.strategy):
            self._program = program.single(built)

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        try:
            ready = self._tap.ready()
        except BaseException as error:
            failure(error)
            return dict.fromkeys(rows, error)
        return dict.fromkeys(rows, Supply(ready[0].batch.size, 1, ready[0].last)) if ready else {}

    def depth(self, row: int) -> tuple[int, int] | None:
        return self._tap.depth, self._tap.capacity

    def advance(self, chunk: Chunk) -> Ticket:
        batch = self._tap.ready()[0].batch
        step = tf.constant(chunk.cursors[0].step, tf.int64)
        nest = tf.nest.pack_sequence_as(batch.nest, list(batch.leaves))
        future = self._rows.train(self._program, [1], lambda _: (nest, step))
        self._tap.take(1)
        return Ticket(chunk, future)

    def close(self) -> None:
        self._tap.close()
        super().close()
