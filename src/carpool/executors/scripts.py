"""Scripts side by side: started as memory allows, their output shown and kept, stopped together. One thread, one selector.

What goes wrong with one script, its log or the showing of its output costs the others nothing.
"""

from __future__ import annotations

import errno
import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from carpool.errors import described
from carpool.executors.interrupt import Bell
from carpool.memory.ledger import Ledger
from carpool.memory.size import shown
from carpool.private import create
from carpool.process.child import Child
from carpool.reporters.prefixed import Lines, Prefixed
from carpool.scripts import Ended, Script

_LOOK_S = 0.2  # the system does not tell when a process has grown, so it is asked this often
_READ_BYTES = 1 << 16
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # of what those that run give back


@dataclass(frozen=True)
class Terms:
    """What scripts run under: how many at once, each one's share of the memory, where their output is kept."""

    logs: Path
    jobs: int
    cap_bytes: int = 0
    """Of each script; 0 is no cap."""
    capacity_bytes: int = 0
    """What the caps of those that run may add up to."""
    is_host_memory: bool = True
    """Whether the cap is on host memory, which is held by stopping a script. A GPU's is held by the framework in it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 5.0


class _Log:
    """The whole output of a script in a file, as far as the disk takes it; `lost` says why it ends before the output."""

    def __init__(self, path: Path) -> None:
        self.lost = ""
        self._file: BinaryIO | None = None
        try:
            self._file = create(path)
        except OSError as error:
            self.lost = error.strerror or str(error)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and self._file is not None and not self.lost:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.lost = error.strerror or str(error)

    def close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:  # some file systems say only now that they are full
            self.lost = self.lost or error.strerror or str(error)


@dataclass
class _Running:
    """A script that has started, until it has ended and its output is read."""

    script: Script
    child: Child
    log: _Log
    started_s: float
    lines: Lines = field(default_factory=Lines)
    is_read: bool = False
    peak_bytes: int = 0
    story: str = ""
    kill_at_s: float | None = None

    def stop(self, story: str, kill_at_s: float) -> None:
        """Asks it to end, once; the first reason stays."""
        if self.kill_at_s is None:
            self.story, self.kill_at_s = story, kill_at_s
            self.child.terminate()

    def close(self) -> None:
        self.child.close()
        self.log.close()


def run(scripts: Sequence[Script], terms: Terms, output: Prefixed, bell: Bell) -> tuple[Ended, ...]:
    """Runs them all and returns when nothing of them is left; the bell stops them."""
    made = _Run(scripts, terms, output, bell)
    try:
        made.loop()
    finally:
        made.close()
    return tuple(made.ended[script.name] for script in scripts)


class _Run:
    """The state of one `run`."""

    def __init__(self, scripts: Sequence[Script], terms: Terms, output: Prefixed, bell: Bell) -> None:
        self._waiting = deque(scripts)
        self._running: dict[str, _Running] = {}
        self.ended: dict[str, Ended] = {}
        self._terms = terms
        self._output = output
        self._bell = bell
        self._ledger = Ledger(terms.capacity_bytes)
        self._watches = terms.is_host_memory and terms.cap_bytes > 0
        self._look_at_s = 0.0
        self._selector = selectors.PollSelector()
        self._selector.register(bell, selectors.EVENT_READ, None)

    def loop(self) -> None:
        while True:
            self._take_bell()
            self._admit()
            if not self._running:
                return
            for key, _ in self._selector.select(self._timeout_s()):
                if key.data is not None:
                    self._take(*key.data)
            self._look()

    def close(self) -> None:
        """Whatever happened, nothing is left running."""
        for running in self._running.values():
            running.close()
        self._selector.close()

    def _admit(self) -> None:
        """Starts those at the head of the line that fit."""
        while self._waiting and len(self._running) < self._terms.jobs:
            script = self._waiting[0]
            self._ledger, is_admitted = self._ledger.offer(script.name, self._terms.cap_bytes)
            if not is_admitted:
                return
            try:
                child = self._child(script)
            except OSError as error:
                self._ledger = self._ledger.release(script.name)
                if error.errno in _SCARCE and self._running:
                    return  # until one of those that run has ended
                self.ended[script.name] = Ended(script.name, None, story=f"not started: {described(error)}")
            else:
                self._watch(script, child)
            self._waiting.popleft()

    def _child(self, script: Script) -> Child:
        return Child(
            script.command,
            env={**self._terms.environment, "CARPOOL_SCRIPT": script.name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def _watch(self, script: Script, child: Child) -> None:
        log = _Log(self._terms.logs / f"{script.file_name}.log")
        running = _Running(script, child, log, time.monotonic())
        self._running[script.name] = running
        if log.lost:
            self._output.show(script.name, [f"carpool: no log of it: {log.lost}".encode()])
        assert child.stdout is not None
        self._selector.register(child.stdout, selectors.EVENT_READ, (running, True))
        if child.code is None:
            self._selector.register(child, selectors.EVENT_READ, (running, False))

    def _take(self, running: _Running, is_output: bool) -> None:
        """Output of a script, or news of it."""
        if is_output:
            self._read(running)
        elif running.child.poll() is not None:
            self._selector.unregister(running.child)
        if running.is_read and running.child.code is not None:
            self._end(running)

    def _read(self, running: _Running) -> None:
        assert running.child.stdout is not None
        data = os.read(running.child.stdout.fileno(), _READ_BYTES)
        self._tell(running, data, running.lines.take(data) if data else running.lines.rest())
        if not data:
            self._selector.unregister(running.child.stdout)
            running.is_read = True

    def _tell(self, running: _Running, data: bytes, lines: list[bytes]) -> None:
        """The log takes the bytes, then the lines are shown; where the log has just ended, one more says so."""
        was_whole = not running.log.lost
        running.log.write(data)
        if was_whole and running.log.lost:
            lines = [*lines, f"carpool: its log ends here: {running.log.lost}".encode()]
        self._output.show(running.script.name, lines)

    def _end(self, running: _Running) -> None:
        name, child = running.script.name, running.child
        peak = max(running.peak_bytes, child.peak_bytes or 0)
        seconds = time.monotonic() - running.started_s
        del self._running[name]
        self._ledger = self._ledger.release(name)
        running.close()
        story = running.story or child.error or ""
        self.ended[name] = Ended(name, child.code, seconds, peak or None, story, running.log.lost)

    def _take_bell(self) -> None:
        """Ctrl-C asks all of them to end, a second one ends them."""
        rung = self._bell.heard()
        if not rung:
            return
        self.ended |= {script.name: Ended(script.name, None, story="not started") for script in self._waiting}
        self._waiting.clear()
        for running in self._running.values():
            running.stop("interrupted", time.monotonic() + self._terms.grace_s)
            if rung > 1:
                running.child.kill()

    def _look(self) -> None:
        """Stops those over their cap, and kills those that were asked to end and did not."""
        now = time.monotonic()
        is_due = self._watches and now >= self._look_at_s
        if is_due:
            self._look_at_s = now + _LOOK_S
        for running in self._running.values():
            if is_due:
                self._measure(running, now)
            if running.kill_at_s is not None and now >= running.kill_at_s:
                running.child.kill()
                running.kill_at_s = float("inf")

    def _measure(self, running: _Running, now: float) -> None:
        used = running.child.rss_bytes() or 0
        running.peak_bytes = max(running.peak_bytes, used)
        if used > self._terms.cap_bytes and running.kill_at_s is None:
            story = f"stopped at {shown(used)} of memory, over its cap of {shown(self._terms.cap_bytes)}"
            running.stop(story, now + self._terms.grace_s)
            line = f"carpool: {story}".encode()
            self._tell(running, line + b"\n", [line])

    def _timeout_s(self) -> float | None:
        """Until there is something to do even if nobody says anything; None is never."""
        now = time.monotonic()
        ends = [r.kill_at_s - now for r in self._running.values() if r.kill_at_s not in (None, float("inf"))]
        waits = [*ends, *([self._look_at_s - now] if self._watches else [])]
        return max(0.0, min(waits)) if waits else None
