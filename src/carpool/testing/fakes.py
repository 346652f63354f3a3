"""Sessions, an adapter and a clock without a framework: what members do is scripted, what was asked of them is recorded.

For tests of whatever drives sessions. A fake holds the driver to the interface: a row that is sent from another step than
the one it stands at, or after it has left, is an AssertionError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool.adapters.base import (
    Adapter,
    Check,
    FusedSession,
    Fuser,
    JobState,
    MetricRow,
    Prepared,
    Session,
    StepFailure,
    Ticket,
    Trained,
)
from carpool.errors import DeviceError, sentence
from carpool.fidelity import Proof
from carpool.job import Job
from carpool.planning.cursor import Chunk, Course, Cursor
from carpool.planning.spec import ModelSpec


class FakeClock:
    """Time that passes only when told to; put it where a module has `time`.

    >>> clock = FakeClock()
    >>> clock.advance(1.5)
    >>> clock.perf_counter()
    1.5
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Script:
    """What a fake member does, by its own step (counted from 0).

    Its loss at a step is `loss(step)`, on its validation data after so many steps `validation(steps)`. It diverges
    when its loss is not finite. It raises `error` in step `raises_at`, and when step `check_raises_at` is checked;
    `validation_error` and `schedule_error` whenever it is evaluated or an epoch of its ends.

    >>> Script(loss=lambda step: 1 / (1 + step)).loss(3)
    0.25
    """

    loss: Callable[[int], float] = lambda step: 1.0
    validation: Callable[[int], float] | None = None
    raises_at: int | None = None
    check_raises_at: int | None = None
    error: Exception = field(default_factory=lambda: RuntimeError("scripted"))
    validation_error: Exception | None = None
    schedule_error: Exception | None = None
    disturbed: str | None = None


@dataclass
class _Row:
    """A scripted member: its "weights" are the number of steps they have had."""

    script: Script
    steps: int = 0
    weights: int = 0
    best: int | None = None
    alive: bool = True

    def take(self, steps: int, size: int) -> tuple[int, float]:
        """Runs so many steps, or up to the first loss that is not finite: how many, and the losses' weighted sum."""
        total = 0.0
        for done in range(steps):
            loss = self.script.loss(self.steps)
            if not math.isfinite(loss):
                self.alive = False
                return done, total
            total += loss * size
            self.steps += 1
            self.weights += 1
        return steps, total


class _Scripted:
    """What both fake sessions do. `calls` holds every call as (word, arguments ...), in order."""

    def __init__(
        self, scripts: Sequence[Script], clock: FakeClock | None = None, step_s: float = 0.0
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.closed = False
        self._rows: dict[int, _Row] = {row: _Row(script) for row, script in enumerate(scripts)}
        self._clock = clock or FakeClock()
        self._step_s = step_s

    def asked(self, word: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of this name."""
        return [arguments for name, *arguments in self.calls if name == word]  # type: ignore[misc]

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk that was to be advanced."""
        return [chunk for (chunk,) in self.asked("advance")]

    def advance(self, chunk: Chunk) -> Ticket:
        self.calls.append(("advance", chunk))
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            assert row in self._rows, f"row {row} has left"
            at = self._rows[row].steps
            assert at == cursor.step or not self._rows[row].alive, f"row {row} stands at {at}, sent {cursor}"
        errors, done = self._failures(chunk)
        ticket = self._run(chunk.shortened(done))
        if errors:
            raise StepFailure([ticket], errors)
        return ticket

    def _failures(self, chunk: Chunk) -> tuple[dict[int, BaseException], int]:
        """The rows that raise first in the chunk, and how many steps come before that."""
        scripted = {row: self._rows[row] for row in chunk.rows if self._rows[row].alive}
        ahead = {
            row: member.script.raises_at - member.steps
            for row, member in scripted.items()
            if member.script.raises_at is not None
        }
        done = min((steps for steps in ahead.values() if 0 <= steps < chunk.steps), default=chunk.steps)
        return {
            row: scripted[row].script.error for row, steps in ahead.items() if steps == done < chunk.steps
        }, done

    def _run(self, chunk: Chunk) -> Ticket:
        self._clock.advance(self._step_s * chunk.steps)
        shown = []
        for row in chunk.rows:
            member = self._rows[row]
            steps, total = member.take(chunk.steps, chunk.size) if member.alive else (0, 0.0)
            shown.append(MetricRow(row, steps, steps * chunk.size, {"loss": total}, not member.alive))
        return Ticket(chunk, tuple(shown))

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        self.calls.append(("metrics", ticket.chunk))
        return ticket.payload

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        self.calls.append(("evaluate", tuple(rows)))
        for row in rows:
            if (error := self._rows[row].script.validation_error) is not None:
                raise error
        return tuple(
            MetricRow(row, 0, 10, {"loss": 10 * validation(self._rows[row].steps)})
            for row in rows
            if (validation := self._rows[row].script.validation) is not None
        )

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("end_epoch", row, dict(metrics)))
        if (error := self._rows[row].script.schedule_error) is not None:
            raise error

    def keep(self, rows: Sequence[int]) -> None:
        self.calls.append(("keep", tuple(rows)))
        for row in rows:
            self._rows[row].best = self._rows[row].weights

    def revert(self, rows: Sequence[int]) -> None:
        self.calls.append(("revert", tuple(rows)))
        for row in rows:
            best = self._rows[row].best
            assert best is not None, f"row {row} was never kept"
            self._rows[row].weights = best

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        self.calls.append(("state", tuple(rows)))
        return self._states(rows)

    def _states(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        members = [self._rows[row] for row in rows]
        return tuple(JobState(Cursor(step=m.steps), {"weights": m.weights}) for m in members)

    def load(self, row: int, state: JobState) -> None:
        self.calls.append(("load", row, state))
        self._rows[row].steps, self._rows[row].weights = state.cursor.step, state.model["weights"]

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        return [inputs for _ in (self._rows if rows is None else rows)]

    def close(self) -> None:
        self.calls.append(("close",))
        self.closed = True


class FakeSession(_Scripted, Session):
    """One scripted job alone.

    >>> session = FakeSession(Script(loss=lambda step: 2.0))
    >>> ticket = session.advance(Chunk((0,), (Cursor(),), size=4, steps=3))
    >>> session.metrics(ticket)[0].sums, session.state([0])[0].cursor.step
    ({'loss': 24.0}, 3)
    """

    def __init__(self, script: Script, clock: FakeClock | None = None, step_s: float = 0.0) -> None:
        super().__init__([script], clock, step_s)


class FakeFusedSession(_Scripted, FusedSession):
    """Scripted jobs stacked. `mismatches` are sentences for the checks to come (None: the check holds), the last for good.
    `proof` is what a check says it did; None: that it compared nothing.

    `launch_s` and `prepare_s` are what `timing` says, so that a test decides whether repacking pays.
    """

    def __init__(
        self,
        scripts: Sequence[Script],
        *,
        mismatches: Sequence[str | None] = (None,),
        proof: Proof | None = Proof.STEPS,
        launch_s: float = 0.0,
        prepare_s: float = math.inf,
        clock: FakeClock | None = None,
    ) -> None:
        super().__init__(scripts, clock, launch_s)
        self.width = len(scripts)
        self._mismatches, self._proof = list(mismatches), proof
        self._timing = (launch_s, prepare_s)

    def check(self, chunk: Chunk, rows: Sequence[int]) -> Check:
        self.calls.append(("check", chunk, tuple(rows)))
        assert self._rows.keys() >= set(chunk.rows) >= set(rows), f"of the rows {chunk.rows} one has left"
        scripts = {row: self._rows[row].script for row in rows}
        errors = {r: s.error for r, s in scripts.items() if s.check_raises_at == self._rows[r].steps}
        if errors:
            raise StepFailure([Ticket(chunk.shortened(0), ())], errors)
        mismatch = self._mismatches.pop(0) if len(self._mismatches) > 1 else self._mismatches[0]
        if self._proof is None:
            return Check()
        return Check(len(rows), 0.0 if mismatch is None else 1.0, mismatch, self._proof)

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        self.calls.append(("leave", tuple(rows)))
        states = self._states(rows)
        for row in rows:
            del self._rows[row]
        return states

    def join(self, row: int, job: Job, state: JobState | None = None) -> None:
        self.calls.append(("join", row, job, state))
        assert row not in self._rows, f"row {row} is taken"
        self._rows[row] = _Row(Script())
        if state is not None:
            self._rows[row].steps, self._rows[row].weights = state.cursor.step, state.model["weights"]

    def copy(self, source: int, target: int) -> None:
        self.calls.append(("copy", source, target))
        self._rows[target].weights = self._rows[source].weights

    def resize(self, width: int) -> Mapping[int, int]:
        self.calls.append(("resize", width))
        assert len(self._rows) <= width, f"{len(self._rows)} members do not fit a width of {width}"
        moved = {row: place for place, row in enumerate(self._rows)}
        self._rows = {moved[row]: member for row, member in self._rows.items()}
        self.width = width
        return moved

    def disturbed(self, row: int) -> str | None:
        return self._rows[row].script.disturbed

    def abandon(self) -> None:
        self.calls.append(("abandon",))

    def timing(self) -> tuple[float, float]:
        return self._timing


class FakeFuser(Fuser):
    """Stacks the jobs of a `FakeAdapter`; `why_not` refuses, `open_error` is raised on opening."""

    def __init__(
        self, adapter: FakeAdapter, why_not: str | None, open_error: Exception | None, **settings: Any
    ) -> None:
        self._adapter = adapter
        self._why_not = why_not
        self._open_error = open_error
        self._settings = settings

    def refusal(self, jobs: Sequence[Job]) -> str | None:
        return self._why_not

    def open(self, jobs: Sequence[Job], width: int, device: str, prepared: Prepared) -> FakeFusedSession:
        if self._open_error is not None:
            raise self._open_error
        session = FakeFusedSession([self._adapter.script(job) for job in jobs], **self._settings)
        prepared(jobs[0].batch_size, width, "traced", 0.0)
        self._adapter.sessions.append(session)
        return session


class FakeAdapter(Adapter):
    """A framework whose models are plain values: jobs of equal `model` have one structure.

    Members do what `scripts` says under their job's name. `sessions` holds every session opened, `absorbed` the
    last state written back for each job. `fused` are settings for its `FakeFusedSession`s.

    >>> adapter = FakeAdapter({"a": Script()})
    >>> adapter.describe(Job("net", ([1, 2, 3], [1, 2, 3]), name="a", loss=max, batch_size=2)).course.batches
    2
    """

    name = "fake"

    def __init__(
        self,
        scripts: Mapping[str, Script] | None = None,
        *,
        why_not: str | None = None,
        open_error: Exception | None = None,
        solo_errors: Mapping[str, Exception] | None = None,
        **fused: Any,
    ) -> None:
        super().__init__()
        self.scripts = dict(scripts or {})
        self.sessions: list[FakeSession | FakeFusedSession] = []
        self.absorbed: dict[str, JobState] = {}
        self._solo_errors = dict(solo_errors or {})
        self.fuser = FakeFuser(self, why_not, open_error, **fused)

    def script(self, job: Job) -> Script:
        return self.scripts.get(str(job.name), Script())

    @classmethod
    def claims(cls, model: Any) -> bool:
        return isinstance(model, str)

    def device(self, name: str) -> str:
        if name not in ("auto", "fake"):
            raise DeviceError(sentence('the device "fake"', repr(name), 'pass device="auto"'))
        return "fake"

    def describe(self, job: Job) -> ModelSpec:
        course = Course(len(job.data[0]), job.batch_size, job.epochs)
        return ModelSpec(
            str(job.name), self.name, (("model", job.model),), course, state_bytes=4, step_bytes=6
        )

    def open(self, job: Job, device: str, plain: bool = False, exact: bool = False) -> FakeSession:
        if (error := self._solo_errors.get(str(job.name))) is not None:
            raise error
        session = FakeSession(self.script(job))
        self.sessions.append(session)
        return session

    def absorb(self, job: Job, state: JobState) -> Trained:
        self.absorbed[str(job.name)] = state
        return self.trained(job)

    def trained(self, job: Job) -> Trained:
        state = self.absorbed.get(str(job.name))
        return Trained(model=None if state is None else dict(state.model))

    def save(self, model: Any, path: Path) -> None:
        path.write_text(repr(model))
