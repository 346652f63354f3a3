"""Which TensorFlow jobs are put into one function, and whether that is faster than one function after another: measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carpool import recall
from carpool.adapters.base import Fuser, Prepared
from carpool.adapters.tensorflow.arrays import Arrays, Store
from carpool.adapters.tensorflow.build import Built
from carpool.adapters.tensorflow.devices import check_place, place_of
from carpool.adapters.tensorflow.session import RowsSession
from carpool.job import Job
from carpool.planning.cursor import Chunk, Cursor
from carpool.planning.spec import Signature
from carpool.planning.trials import Trial


@dataclass(frozen=True)
class Known:
    """A job as this run knows it."""

    built: Built
    signature: Signature
    plain_reason: str | None


class ModuleFuser(Fuser):
    """Jobs of one structure in one function, each with a loop of its own."""

    def __init__(self, known: Callable[[Job], Known], store: Store, device: Callable[[], str]) -> None:
        self._known, self._store, self._device = known, store, device

    def refusal(self, jobs: Sequence[Job]) -> str | None:
        for job in jobs:
            built = self._known(job).built
            if not isinstance(built.data, Arrays):
                return "each reads a stream of its own"
            if built.strategy is not None:
                return "a tf.distribute strategy spreads each over devices"
            if built.random is not None:
                return (
                    f"{built.random} draws from TensorFlow's global generator, and not by the job's seed: take a seed in "
                    "step(model, batch, seed) for tf.random.stateless_*, or keep a tf.random.Generator in the module"
                )
        return None

    def tried(self, jobs: Sequence[Job], measure: bool = False) -> Trial | None:
        found = recall.remembered(self._key(jobs))
        if found is not None or not measure:
            return found
        session = self.open(jobs, len(jobs), self._device())
        try:
            return session.trial(_first(session, jobs))
        finally:
            session.close()

    def open(
        self, jobs: Sequence[Job], width: int, device: str, prepared: Prepared = lambda *_: None
    ) -> RowsSession:
        known = [self._known(job) for job in jobs]
        for one in known:
            check_place(one.built, place_of(device))
        is_jit = all(one.plain_reason is None for one in known)
        key = self._key(jobs)
        return RowsSession(
            [one.built for one in known],
            self._store,
            place_of(device),
            is_jit,
            prepared,
            lambda trial, busy: recall.remember(key, trial, busy),
        )

    def _key(self, jobs: Sequence[Job]) -> str:
        first = self._known(jobs[0])
        told = repr((first.signature, first.plain_reason is None, len(jobs), self._device()))
        return "tensorflow " + hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _first(session: RowsSession, jobs: Sequence[Job]) -> Chunk:
    rows = tuple(range(len(jobs)))
    size = max(session.sizes)
    return Chunk(rows, tuple(Cursor() for _ in rows), size, 1)
