"""What rows of a stack that read one stream take next: its batches, one at a time, the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from carpool.adapters.jax.build import Built
from carpool.adapters.jax.program import Order
from carpool.adapters.jax.streams import Batch, Streamed, supply_of
from carpool.errors import failure
from carpool.planning.cursor import Chunk, Supply


class Taking:
    """The counterpart of `Reading`, for a stream. The next batch is the pool, read from its beginning to its end."""

    is_shared = True

    def __init__(self, builts: Sequence[Built], device: Any) -> None:
        data = builts[0].data
        assert isinstance(data, Streamed)
        assert data.source is not None
        self._width, self._device = len(builts), device
        self._tap = data.source.tap(max(built.job.epochs for built in builts))
        self._first = data.source.first()

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        try:
            found = supply_of(self._tap.ready())
        except BaseException as error:
            failure(error)
            return dict.fromkeys(rows, error)
        return {} if found is None else dict.fromkeys(rows, found)

    def depth(self) -> tuple[int, int]:
        return self._tap.depth, self._tap.capacity

    @property
    def _batch(self) -> Batch:
        ready = self._tap.ready()
        return ready[0].batch if ready else self._first

    @property
    def nest(self) -> Any:
        return self._batch.nest

    def order(self, chunk: Chunk) -> Order:
        places = np.arange(chunk.size, dtype=np.int32)[None]
        return Order(jax.device_put(places, self._device), np.zeros(self._width, np.int32))

    def taken(self) -> None:
        self._tap.take(1)

    def narrow(self, rows: Sequence[int]) -> None:
        self._width = len(rows)

    def close(self) -> None:
        self._tap.close()
