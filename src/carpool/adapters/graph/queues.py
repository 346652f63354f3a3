"""A graph's queue runners: threads that fill its queues, started with a session and always stopped with it."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

_v1 = tf.compat.v1
_GRACE_S = 5.0


class Runners:
    """The queue runners of one session, under one coordinator."""

    def __init__(self, session: Any) -> None:
        self._coordinator = _v1.train.Coordinator()
        found = session.graph.get_collection(_v1.GraphKeys.QUEUE_RUNNERS)
        self._threads = [
            thread
            for runner in found
            for thread in runner.create_threads(session, coord=self._coordinator, daemon=True, start=True)
        ]

    def error(self) -> BaseException | None:
        """What one of them raised; the end of its input is no error."""
        try:
            self._coordinator.raise_requested_exception()
        except BaseException as error:
            return error
        return None

    def ask(self) -> None:
        """Asks them to stop: whoever waits for their queues goes on, or finds these closed."""
        self._coordinator.request_stop()

    def stop(self) -> None:
        self.ask()
        with contextlib.suppress(Exception):  # what they raised has reached the job
            self._coordinator.join(self._threads, stop_grace_period_secs=_GRACE_S, ignore_live_threads=True)
