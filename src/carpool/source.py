"""What a stream's batches are read from, whoever takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from carpool.data import Reader, Tap


class Source:
    """What passes come from. Taps made before anything was taken share one reader: it is read once for all of them."""

    def __init__(
        self, passes: Callable[[int], Iterable[Any]], capacity: int, prepare: Callable[[Any], Any]
    ) -> None:
        self._passes, self.capacity, self._prepare = passes, capacity, prepare
        self._readers: list[Reader] = []

    def first(self) -> Any:
        """The first batch; it is read again by every tap."""
        return self._fresh().first().batch

    def tap(self, epochs: int) -> Tap:
        return self._fresh().tap(epochs)

    def _fresh(self) -> Reader:
        if not self._readers or not self._readers[-1].fresh:
            self._readers.append(Reader(self._passes, self.capacity, self._prepare))
        return self._readers[-1]

    def stop(self) -> None:
        for reader in self._readers:
            reader.stop()
