"""Whose turn it is: the lane that can go on and has had the least time, weighed by priority."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import carpool
from carpool.adapters.base import Ticket
from carpool.events import Event, JobEnded
from carpool.executors import interleaved, lane
from carpool.executors.driver import Ready
from carpool.executors.interleaved import Orders, Run
from carpool.executors.interrupt import Pause
from carpool.executors.lane import Lane, next_lane
from carpool.planning.cursor import Chunk, Supply
from carpool.planning.plan import make_plan
from carpool.testing import FakeAdapter, FakeClock, FakeSession, Script


class Scripted:
    """A driver that takes so many seconds a turn and waits for what it is told to wait for."""

    slice_s = None

    def __init__(self, clock: FakeClock, turn_s: float, waits: Ready = lambda: True) -> None:
        self._clock, self._turn_s, self._waits = clock, turn_s, waits

    def run(self, verify: bool, measure: bool) -> Iterator[Ready]:
        while True:
            self._clock.advance(self._turn_s)
            yield self._waits


def lanes(
    monkeypatch: pytest.MonkeyPatch, turns_s: dict[str, float], weights: dict[str, float] | None = None
) -> dict[str, Lane]:
    clock = FakeClock()
    monkeypatch.setattr(lane, "time", clock)
    drivers: dict[str, Any] = {name: Scripted(clock, turn_s) for name, turn_s in turns_s.items()}
    return {
        name: Lane(driver, FakeSession(Script()), False, False, (weights or {}).get(name, 1.0), 0.0)
        for name, driver in drivers.items()
    }


def turns(made: dict[str, Lane], count: int) -> dict[str, int]:
    taken = dict.fromkeys(made, 0)
    for _ in range(count):
        chosen = next_lane(list(made.values()))
        assert chosen is not None
        assert chosen.advance()
        taken[next(name for name, one in made.items() if one is chosen)] += 1
    return taken


def test_a_lane_of_short_turns_gets_more_of_them_and_the_same_time(monkeypatch: pytest.MonkeyPatch):
    assert turns(lanes(monkeypatch, {"short": 1.0, "long": 4.0}), 100) == {"short": 80, "long": 20}


def test_time_is_shared_by_weight(monkeypatch: pytest.MonkeyPatch):
    made = lanes(monkeypatch, {"low": 1.0, "high": 1.0}, {"high": 4.0})
    assert turns(made, 100) == {"low": 20, "high": 80}


def test_a_lane_that_comes_later_starts_where_the_others_stand(monkeypatch: pytest.MonkeyPatch):
    made = lanes(monkeypatch, {"early": 1.0})
    turns(made, 50)
    clock = FakeClock()
    monkeypatch.setattr(lane, "time", clock)
    made["early"].driver._clock = clock  # type: ignore[attr-defined]
    driver: Any = Scripted(clock, 1.0)
    late = Lane(driver, FakeSession(Script()), False, False, 1.0, made["early"].used_s)
    assert turns({**made, "late": late}, 10) == {"early": 5, "late": 5}


def test_a_lane_that_waits_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    made = lanes(monkeypatch, {"waits": 1.0, "goes": 1.0})
    made["waits"]._ready = lambda: False
    assert turns(made, 10) == {"waits": 0, "goes": 10}
    made["goes"]._ready = lambda: False
    assert next_lane(list(made.values())) is None


# In a run


class Slow(FakeSession):
    """A session whose chunks are done only when asked for the third time, and whose input comes late."""

    def __init__(self, script: Script, log: list[str], name: str) -> None:
        super().__init__(script)
        self._log, self._name, self._asked = log, name, 0

    def advance(self, chunk: Chunk) -> Ticket:
        self._log.append(self._name)
        self._asked = 0
        return super().advance(chunk)

    def done(self, ticket: Ticket) -> bool:
        self._asked += 1
        return self._asked > 2


class SlowAdapter(FakeAdapter):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = []

    def open(self, job: carpool.Job, device: str, plain: bool = False, exact: bool = False) -> FakeSession:
        session = Slow(self.script(job), self.log, str(job.name))
        self.sessions.append(session)
        return session


def run(jobs: list[carpool.Job], adapter: FakeAdapter, strategy: str = "auto") -> list[Event]:
    events: list[Event] = []
    by_name = {str(job.name): job for job in jobs}
    plan = make_plan(
        [adapter.describe(job) for job in jobs],
        lambda members: None,
        device="fake",
        free_bytes=1000,
        strategy=strategy,
    )
    with Pause() as pause:
        Run(plan, by_name, {"fake": adapter}, Orders("fake", strategy), events.append).groups(pause)
    return events


def job(name: str, **options: Any) -> carpool.Job:
    data = (range(8), range(8))
    return carpool.Job(f"net {name}", data, **{"name": name, "loss": max, "batch_size": 4, **options})


def watched(name: str, **options: Any) -> carpool.Job:
    return job(name, epochs=4, callbacks=[lambda event: None], **options)


def test_while_one_waits_for_its_device_the_others_go_on():
    adapter = SlowAdapter()
    run([watched("a"), watched("b"), watched("c")], adapter)
    assert sorted(adapter.log) == sorted("abc" * 4)
    assert adapter.log[:3] == ["a", "b", "c"]


def test_in_turn_one_ends_before_the_next_begins():
    adapter = SlowAdapter()
    run([watched("a"), watched("b"), watched("c")], adapter, "in_turn")
    assert adapter.log == ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def test_higher_priority_is_opened_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interleaved, "MOST_OPEN", 1)
    events = run([job("a"), job("b", priority=1), job("c")], FakeAdapter())
    assert [event.name for event in events if isinstance(event, JobEnded)] == ["b", "a", "c"]


class Streaming(FakeSession):
    """Three batches an epoch that come one at a time, each when it has been asked for three times."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(Script(loss=float))
        self._asked, self._left, self._error = 0, 3, error

    def supply(self, rows: Sequence[int]) -> dict[int, Supply | BaseException]:
        self._asked += 1
        if self._asked < 3:
            return {}
        if self._error is not None and self._left == 1:
            return {0: self._error}
        return {0: Supply(4, 1, ends=self._left == 1)}

    def advance(self, chunk: Chunk) -> Ticket:
        self._asked, self._left = 0, 3 if self._left == 1 else self._left - 1
        return super().advance(chunk)


class StreamingAdapter(FakeAdapter):
    error: Exception | None = None

    def describe(self, job: carpool.Job) -> Any:
        from dataclasses import replace

        spec = super().describe(job)
        return replace(spec, course=spec.course._replace(length=0, batch_size=0, streamed=True))

    def open(self, job: carpool.Job, device: str, plain: bool = False, exact: bool = False) -> FakeSession:
        session = Streaming(self.error)
        self.sessions.append(session)
        return session


def test_a_streamed_epoch_ends_when_its_batches_do():
    adapter = StreamingAdapter()
    events = run([job("a", epochs=2)], adapter)
    (session,) = adapter.sessions
    assert [(c.cursors[0].epoch, c.cursors[0].batch) for c in session.chunks] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)
    ]  # fmt: skip
    assert [event.outcome.word for event in events if isinstance(event, JobEnded)] == ["completed"]


def test_input_that_raises_fails_its_job_with_what_it_had_reached():
    adapter = StreamingAdapter()
    adapter.error = OSError("disk gone")
    events = run([job("a", epochs=2)], adapter)
    (ended,) = [event for event in events if isinstance(event, JobEnded)]
    assert (ended.outcome.word, ended.steps) == ("failed", 2)
