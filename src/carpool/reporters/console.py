"""Progress on the console: a live display in a terminal, a few plain lines everywhere else (logs, pipes, notebooks)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import get_args

import rich.console
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from carpool.events import (
    Event,
    GroupFellBack,
    GroupStarted,
    JobFailed,
    PreparationBegan,
    RunEnded,
    RunStarted,
)
from carpool.planning.plan import Plan
from carpool.reporters import lines
from carpool.reporters.display import frame
from carpool.reporters.pace import Pace
from carpool.reporters.tally import Tally
from carpool.reporters.watch import Watch

_PROGRESS_EVERY_S = 10.0
_REFRESHES_PER_S = 4
_MOST_FAILURES = 10  # said one by one; the summary counts them all


class _Quiet(rich.console.Console):
    """A console whose reader may go away: then there is nobody to show anything to, and the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Console:
    """A reporter that shows a run where people look at it; writes to standard error, so that output stays clean.

    >>> import io
    >>> log = io.StringIO()
    >>> show = Console(console=rich.console.Console(file=log))
    >>> show(RunEnded(seconds=1.5)); show.close()
    >>> print(log.getvalue().strip())
    0 jobs: none ended; 0 member-steps in 1.5 s
    """

    hears = frozenset(get_args(Event))

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, console: rich.console.Console | None = None
    ) -> None:
        self._clock = clock
        self._console = console or _Quiet(stderr=True)
        self._lock = threading.Lock()  # the display's thread reads the tally while the run writes it
        self._live: Live | None = None
        self._watch: Watch | None = None
        self._begin()

    def __call__(self, event: Event) -> None:
        """Takes one event of the run."""
        if isinstance(event, PreparationBegan):
            self._await(event.what)
            return
        if isinstance(event, RunStarted):
            self._close_display()
            self._begin()
        with self._lock:
            self._tally.take(event)
        if isinstance(event, RunStarted) and self._console.is_interactive and not self._console.is_jupyter:
            self._open()
        if self._live is not None:
            self._await(None)
            self._beside_display(event)
        else:
            self._await(_awaited(event))
            self._log(event)

    def close(self) -> None:
        """Stops the display and gives the terminal back; safe to call at any time, more than once."""
        self._close_display()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _await(self, what: str | None) -> None:
        """Lets the watch say it, if it takes a while."""
        if self._watch is None:
            if what is None:
                return
            self._watch = Watch(lambda text: self._say(f"carpool: {text}"))
        self._watch.wait_for(what)

    def _close_display(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _begin(self) -> None:
        self._tally = Tally()
        self._start_s = self._said_s = self._clock()
        self._pace = Pace(self._start_s)
        self._failures: set[str] = set()

    def _open(self) -> None:
        self._live = Live(
            get_renderable=self._frame, console=self._console, refresh_per_second=_REFRESHES_PER_S
        )
        self._live.start()

    def _frame(self) -> RenderableType:
        now = self._clock()
        with self._lock:
            self._tally.settle()
            pace = self._pace.at(now, self._tally.steps)
            return frame(self._tally, pace, now - self._start_s, self._console.height)

    def _beside_display(self, event: Event) -> None:
        match event:
            case RunStarted(plan):
                self._say_rejected(plan)
            case JobFailed(name):
                self._say_failure(name)
            case GroupFellBack():
                self._say(lines.line(event, self._tally))
            case RunEnded():
                self._close_display()
                self._say(lines.summary(self._tally, self._clock() - self._start_s))
            case _:
                pass

    def _log(self, event: Event) -> None:
        now = self._clock()
        match event:
            case RunStarted(plan):
                self._say(lines.line(event, self._tally))
                self._say_rejected(plan)
            case JobFailed(name):
                self._say_failure(name)
            case RunEnded():
                self._say(lines.summary(self._tally, now - self._start_s))
            case _ if text := lines.line(event, self._tally):
                self._say(text)
            case _ if now - self._said_s >= _PROGRESS_EVERY_S:
                self._said_s = now
                self._tally.settle()
                pace = self._pace.at(now, self._tally.steps)
                self._say(lines.progress(self._tally, pace, now - self._start_s))
            case _:
                pass

    def _say_rejected(self, plan: Plan) -> None:
        for name in plan.rejected:
            self._say_failure(name)

    def _say_failure(self, name: str) -> None:
        if name in self._failures or len(self._failures) >= _MOST_FAILURES:
            return
        self._failures.add(name)
        self._say(lines.failure(name, self._tally.errors[name]))

    def _say(self, text: str | None) -> None:
        if text is not None:
            self._console.print(Text(text), soft_wrap=True)


def _awaited(event: Event) -> str | None:
    """What is being waited for after an event, where nothing else is said of it."""
    match event:
        case GroupStarted(_, names) if len(names) > 1:
            return "preparing the first steps: tracing, checking, and compiling where that was asked for"
        case _:
            return None
