"""What sessions of all kinds do with the jobs in them: numbers of a launch, validation, best weights, states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.adapters.base import JobState, MetricRow
from carpool.adapters.tensorflow import mirrored, program
from carpool.adapters.tensorflow.arrays import Store
from carpool.adapters.tensorflow.build import Built
from carpool.adapters.tensorflow.program import HEAD, Program
from carpool.adapters.tensorflow.state import Remembered, state_of, write

Arguments = Callable[[Any], Sequence[Any]]
"""What a program is given, of how many steps each row takes."""


class Rows:
    """Jobs and a thread that runs their launches in order, while the caller goes on."""

    def __init__(self, builts: Sequence[Built], store: Store, device: str) -> None:
        self.builts, self._store, self.device = list(builts), store, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carpool tensorflow")
        self._last: Future[Any] | None = None
        self._unsound: set[int] = set()
        self._error: BaseException | None = None
        self._best: dict[Built, Remembered] = {}
        self._tests: dict[tuple[Built, int | None], Program] = {}
        for built in self.builts:
            if built.validation is not None:
                self._validation(built)

    # Launches

    def train(self, run: Program, counts: Iterable[int], arguments: Arguments) -> Future[list[np.ndarray]]:
        """So many steps of each row. One whose loss was not finite takes none any more, also while nobody knows of it yet."""

        def go(*given: Any) -> list[np.ndarray]:
            taken = np.array([0 if row in self._unsound else count for row, count in enumerate(counts)])
            if not taken.any():
                return [np.array([0.0, 0.0, 1.0, *[0.0] * len(built.names)]) for built in self.builts]
            vectors = run(*arguments(tf.constant(taken.astype(np.int32))))
            self._unsound |= {row for row, vector in enumerate(vectors) if not vector[HEAD - 1]}
            return vectors

        return self.submit(go)

    def submit(self, run: Callable[..., Any], *arguments: Any) -> Future[list[np.ndarray]]:
        """What fails is not followed by what was enqueued behind it."""

        def go() -> list[np.ndarray]:
            if self._error is not None:
                raise self._error
            try:
                with tf.device(self.device), mirrored.scope(self.builts[0].strategy):
                    return run(*arguments)
            except BaseException as error:
                self._error = error
                raise

        self._last = self._thread.submit(go)
        return self._last

    def wait(self) -> None:
        """Until nothing is enqueued; what failed there is told by its ticket."""
        if self._last is not None:
            self._last.exception()

    def metric_row(self, row: int, vector: np.ndarray) -> MetricRow:
        taken, samples, is_sound = vector[:HEAD]
        sums = dict(zip(self.builts[row].names, vector[HEAD:].tolist(), strict=False))
        return MetricRow(row, int(taken), int(samples), sums, diverged=not is_sound)

    # Validation

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        wanted = [(row, self.builts[row]) for row in rows if self.builts[row].validation is not None]
        return tuple(MetricRow(row, 0, *self._totals(built)) for row, built in wanted)

    def _totals(self, built: Built) -> tuple[int, Mapping[str, float]]:
        parts = [
            self.submit(run, *map(tf.constant, given)).result()[0] for run, given in self._validation(built)
        ]
        whole = np.sum(parts, axis=0)
        return int(whole[1]), dict(zip(built.names, whole[HEAD:].tolist(), strict=True))

    def _validation(self, built: Built) -> list[tuple[Program, tuple[int, int, int]]]:
        """Full batches, then the short last one: where each begins, how many there are, and their samples."""
        assert built.validation is not None
        length = built.validation.length
        size = min(length, built.job.batch_size)
        rest = length % size
        parts = [(0, length // size, size), *([(length - rest, 1, rest)] if rest else [])]
        return [(self._test(built, given[2] if built.is_exact else None), given) for given in parts]

    def _test(self, built: Built, size: int | None) -> Program:
        if (built, size) not in self._tests:
            assert built.validation is not None
            leaves = self._store.all(self.device, built.validation)
            with mirrored.scope(built.strategy):
                self._tests[built, size] = program.validation(built, leaves, size)
        return self._tests[built, size]

    # States

    def keep(self, rows: Sequence[int]) -> None:
        self.wait()
        for row in rows:
            self._best[self.builts[row]] = Remembered(self.builts[row].variables)

    def revert(self, rows: Sequence[int]) -> None:
        """The model's variables; the optimizer stays where training ended."""
        self.wait()
        for row in rows:
            if self.builts[row] in self._best:
                self._best[self.builts[row]].put_back()

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        self.wait()
        return tuple(state_of(self.builts[row]) for row in rows)

    def load(self, row: int, state: JobState) -> None:
        self.wait()
        self._unsound.discard(row)
        write(self.builts[row], state)

    def close(self) -> None:
        self._thread.shutdown()
        self._best.clear()
        self._tests.clear()
