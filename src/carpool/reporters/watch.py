"""Says what a run waits for, once it has waited for a while: the run itself has no time to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_S = 0.8  # whoever sees nothing for longer wonders
_AGAIN_S = 10.0
_LOOK_EVERY_S = 0.2


class Watch:
    """A thread of its own that says what is being waited for: soon, and every ten seconds again.

    >>> said = []
    >>> watch = Watch(said.append, patience_s=0.0, clock=lambda: 5.0)
    >>> watch.wait_for("planning 3 jobs"); watch.look(); watch.close()
    >>> said
    ['planning 3 jobs ...']
    """

    def __init__(
        self,
        say: Callable[[str], None],
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._patience_s, self._clock = say, patience_s, clock
        self._lock = threading.Lock()
        self._what: str | None = None
        self._since_s = self._next_s = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def wait_for(self, what: str | None) -> None:
        """What is being waited for from now on; None for nothing."""
        with self._lock:
            self._what, self._since_s = what, self._clock()
            self._next_s = self._since_s + self._patience_s
        if what is not None and self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="carpool-watch", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Says what has been waited for long enough."""
        with self._lock:
            now = self._clock()
            if self._what is None or now < self._next_s:
                return
            waited_s, self._next_s = now - self._since_s, now + _AGAIN_S
            what = f"{self._what} ..." + (f" {waited_s:.0f} s" if waited_s >= _AGAIN_S else "")
        self._say(what)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            self.look()
