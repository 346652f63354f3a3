"""JAX in a process of its own, so that neither framework's memory or streams touch the other's.

A row has its own process: ending it gives back all of its memory, which JAX's allocator otherwise keeps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from benchmarks.record import Measured, Window
from benchmarks.windows import Way, timed

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.peers_jax import Epochs
    from benchmarks.workloads import Data, Member, Workload

NAME = "JAX vmap + scan"
_ANSWER_S = 150.0  # it may look for fast convolutions for as long as it is let


@dataclass(frozen=True)
class Prepare:
    """Build, compile and run one epoch; windows of `window_s` are asked for later."""

    workload: str
    x: np.ndarray
    y: np.ndarray
    learning_rates: np.ndarray
    batch_size: int
    precision: str
    window_s: float


@dataclass(frozen=True)
class Again:
    """Run one window."""


@dataclass(frozen=True)
class Ran:
    """The window that was asked for, or why there is none."""

    window: Window | None
    peak_bytes: int | None = None
    error: str = ""


class Jax(Way):
    """The worker's end in this process. Once begun, it imports, builds and compiles beside whoever is prepared here."""

    name = NAME

    def __init__(
        self, workload: Workload, members: Sequence[Member], data: Data, device: str, window_s: float
    ) -> None:
        self.members = len(members)
        self._order = (workload, members, data, window_s)
        self._platform = "cuda" if device.startswith("cuda") else "cpu"
        self._peak_bytes: int | None = None
        self._pipe: Connection | None = None
        self._process: BaseProcess | None = None

    def begin(self) -> None:
        import numpy as np

        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._platform), daemon=True)
        self._process.start()
        theirs.close()
        workload, members, data, window_s = self._order
        rates = np.array([member.lr for member in members])
        x, y = data.x.cpu().numpy(), data.y.cpu().numpy()
        self._pipe.send(
            Prepare(workload.name, x, y, rates, workload.batch_size, workload.precision, window_s)
        )

    def prepare(self) -> Window:
        if self._pipe is None:
            self.begin()
        return self._answer()

    def window(self) -> Window:
        assert self._pipe is not None, "prepare comes first"
        with suppress(OSError):  # one that has ended is found out when it does not answer
            self._pipe.send(Again())
        return self._answer()

    def finished(self, measured: Measured) -> Measured:
        return replace(measured, peak_bytes=self._peak_bytes)

    def close(self) -> None:
        if self._pipe is None or self._process is None:
            return
        self._pipe.close()
        self._process.join(timeout=1)
        if self._process.is_alive():  # it may be compiling what nobody waits for any more
            self._process.kill()
            self._process.join()

    def _answer(self) -> Window:
        assert self._pipe is not None, "begin comes first"
        if not self._pipe.poll(_ANSWER_S):
            raise TimeoutError(f"the JAX process was still at it after {_ANSWER_S:.0f} s")
        try:
            reply: Ran = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(
                "the JAX process ended (its own output says why); is JAX installed?"
            ) from error
        if reply.window is None:
            raise RuntimeError(reply.error)
        self._peak_bytes = reply.peak_bytes
        return reply.window


def serve(pipe: Connection, platform: str) -> None:
    """The worker: answers until the other end is closed."""
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": platform}
    server = _Server()
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            window = server.answer(request)
            pipe.send(Ran(window, server.peak_bytes()))
        except Exception as error:
            pipe.send(Ran(None, error=f"{type(error).__name__}: {error}"[:300]))


class _Server:
    def __init__(self) -> None:
        import jax

        jax.devices()  # starts the backend before anything is timed
        self._epochs: Epochs | None = None
        self._steps_an_epoch = 0
        self._window_s = 0.0
        self._calls: int | None = None

    def answer(self, request: Prepare | Again) -> Window:
        if isinstance(request, Prepare):
            return timed(lambda: self._begin(request))
        if self._calls is None:  # not when it was prepared: others were at work on the device then
            self._calls = max(1, round(self._window_s / timed(lambda: self._run(1)).seconds))
        return timed(lambda calls=self._calls: self._run(calls))

    def _begin(self, request: Prepare) -> int:
        from benchmarks import peers_jax

        self._window_s = request.window_s
        members = len(request.learning_rates)
        self._steps_an_epoch = members * (len(request.x) // request.batch_size)
        self._epochs = peers_jax.epochs(
            request.workload,
            request.x,
            request.y,
            request.learning_rates,
            request.batch_size,
            request.precision,
        )
        return self._run(1)

    def _run(self, epochs: int) -> int:
        assert self._epochs is not None, "Prepare comes first"
        self._epochs.run(epochs)
        return epochs * self._steps_an_epoch

    def peak_bytes(self) -> int | None:
        import jax

        stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use")
