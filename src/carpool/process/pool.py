"""Workers that take calls as they become free; one that dies is replaced, and only its call fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from carpool.errors import WorkerError
from carpool.memory.size import shown
from carpool.process.messages import Call, Raised, Returned
from carpool.process.ready import ready
from carpool.process.supervisor import Supervisor
from carpool.process.wire import Blocks

_WAIT_S = 0.05  # how long to wait for news before looking at timeouts and Ctrl-C


@dataclass(frozen=True)
class Ended:
    """A call that has ended: its position, what it returned or raised, and how long it took."""

    position: int
    answer: Returned | Raised
    seconds: float


class Pool:
    """At most `size` workers. `limit_bytes` is the memory that each may hold, looked at with every beat."""

    def __init__(
        self,
        size: int,
        env: Mapping[str, str],
        timeout_s: float | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._size, self._env = size, env
        self._timeout_s, self._limit_bytes = timeout_s, limit_bytes
        self._idle: list[Supervisor] = []
        self._busy: dict[Supervisor, tuple[int, float]] = {}

    def run(self, calls: Sequence[Call], blocks: Blocks, check: Callable[[], None]) -> Iterator[Ended]:
        """The calls' ends, as they come. `check` is called now and then, and may raise."""
        waiting = list(reversed(range(len(calls))))
        while waiting or self._busy:
            while waiting and len(self._busy) < self._size:
                self._start(waiting[-1], calls[waiting[-1]], blocks)
                waiting.pop()
            ready(list(self._busy), _WAIT_S)
            for worker in list(self._busy):
                if (ended := self._ended(worker)) is not None:
                    yield ended
            check()

    def _start(self, position: int, call: Call, blocks: Blocks) -> None:
        worker = self._idle.pop() if self._idle else Supervisor(self._env, self._timeout_s)
        self._busy[worker] = (position, time.perf_counter())
        worker.call(call, blocks)

    def _ended(self, worker: Supervisor) -> Ended | None:
        position, started_s = self._busy[worker]
        try:
            answer = worker.poll()
            self._check_memory(worker)
        except WorkerError as error:
            answer = Raised(error)
        if not isinstance(answer, Returned | Raised):
            return None
        del self._busy[worker]
        if isinstance(answer, Raised) and isinstance(answer.error, WorkerError):
            worker.stop()  # it is dead, or says what nobody understands
        else:
            self._idle.append(worker)
        return Ended(position, answer, time.perf_counter() - started_s)

    def _check_memory(self, worker: Supervisor) -> None:
        held = worker.beat.rss_bytes if worker.beat is not None else None
        if self._limit_bytes is not None and held is not None and held > self._limit_bytes:
            worker.kill()
            raise WorkerError(
                f"A worker process held {shown(held)} of memory and was stopped: {shown(self._limit_bytes)} is its part. "
                "Remedy: pass fewer workers or more memory."
            )

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left running, whatever happened."""
        workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.stop()
