"""Groups beside one another on a fake adapter: whose turn it is, falling back, failing, interrupting, memory."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

import carpool
from carpool.errors import FusionError
from carpool.events import (
    EpochEnded,
    Event,
    GroupCompiled,
    GroupFellBack,
    GroupStarted,
    JobAdmitted,
    JobEnded,
    JobFailed,
)
from carpool.executors import interleaved
from carpool.executors.interleaved import Orders, Run
from carpool.executors.interrupt import Pause
from carpool.planning.plan import Plan, make_plan
from carpool.result import Outcome
from carpool.testing import FakeAdapter, FakeClock, FakeFusedSession, FakeSession, Script


def job(name: str, model: str = "net", length: int = 8, **options: Any) -> carpool.Job:
    data = (range(length), range(length))
    return carpool.Job(model, data, **{"name": name, "loss": max, "batch_size": 4, "epochs": 2, **options})


class Trip:
    """A run of these jobs on a fake adapter, and everything it said."""

    def __init__(
        self,
        jobs: Sequence[carpool.Job],
        adapter: FakeAdapter,
        strategy: str = "auto",
        rejected: dict[str, BaseException] | None = None,
        free_bytes: int = 1000,
        **orders: Any,
    ) -> None:
        self.adapter = adapter
        self.events: list[Event] = []
        by_name = {str(job.name): job for job in jobs}
        specs = [adapter.describe(job) for name, job in by_name.items() if name not in (rejected or {})]
        self.plan: Plan = make_plan(
            specs,
            lambda members: adapter.fuser and adapter.fuser.refusal([by_name[spec.name] for spec in members]),
            device="fake",
            free_bytes=free_bytes,
            strategy=strategy,
            rejected=rejected,
        )
        self.pause = Pause()
        self.run = Run(
            self.plan, by_name, {"fake": adapter}, Orders("fake", strategy, **orders), self.events.append
        )

    def go(self) -> Trip:
        with self.pause:
            self.run.groups(self.pause)
        return self

    def outcomes(self) -> dict[str, str]:
        return {name: result.outcome.word for name, result in self.run.results.items()}

    def seen(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def held_bytes(self) -> int:
        return self.run._ledger.held_bytes


def pair(**options: Any) -> list[carpool.Job]:
    return [job("a", **options), job("b", **options)]


# The plain way through


def test_a_group_that_fuses_runs_in_one_session():
    trip = Trip(pair(), FakeAdapter()).go()
    (session,) = trip.adapter.sessions
    assert isinstance(session, FakeFusedSession)
    assert session.closed
    assert trip.outcomes() == {"a": "completed", "b": "completed"}
    assert {result.strategy for result in trip.run.results.values()} == {"fused"}
    assert trip.seen(GroupStarted) == [GroupStarted(0, ("a", "b"), "fused")]
    assert trip.seen(JobAdmitted) == [JobAdmitted("a", 0, 10), JobAdmitted("b", 0, 10)]
    assert trip.seen(GroupCompiled) == [GroupCompiled(0, 4, 2, "traced", 0.0)]


def test_jobs_of_different_structures_have_a_session_each():
    trip = Trip([job("a", "net"), job("b", "other")], FakeAdapter()).go()
    assert [type(session) for session in trip.adapter.sessions] == [FakeSession, FakeSession]
    assert all(session.closed for session in trip.adapter.sessions)
    assert [event.group for event in trip.seen(GroupStarted)] == [0, 1]
    assert trip.run.results["b"].strategy == "interleaved"
    assert "no other job has its structure" in trip.run.results["a"].reason


def test_a_result_holds_what_the_job_reached():
    scripts = {"a": Script(loss=float, validation=lambda steps: 1.0 / steps)}
    trip = Trip([job("a", config={"lr": 0.1}, validation_data=([0], [0]))], FakeAdapter(scripts)).go()
    result = trip.run.results["a"]
    assert result.history == {"loss": (0.5, 2.5), "val_loss": (0.5, 0.25)}
    assert (result.steps, result.config, result.model) == (4, {"lr": 0.1}, {"weights": 4})
    assert trip.seen(JobEnded) == [JobEnded("a", Outcome.COMPLETED, 4)]


def test_seconds_run_until_the_jobs_own_end(monkeypatch: pytest.MonkeyPatch):
    clock = FakeClock()
    monkeypatch.setattr(interleaved, "time", clock)
    adapter = FakeAdapter(launch_s=0.5, clock=clock)
    trip = Trip([job("a", epochs=1), job("b", epochs=3)], adapter).go()
    assert {name: result.seconds for name, result in trip.run.results.items()} == {"a": 1.0, "b": 3.0}


# Failing


def test_a_job_that_fails_is_a_value_and_the_next_group_runs():
    error = RuntimeError("mine")
    adapter = FakeAdapter({"a": Script(raises_at=3, error=error)})
    trip = Trip([job("a", "net"), job("b", "other")], adapter).go()
    assert trip.outcomes() == {"a": "failed", "b": "completed"}
    assert trip.run.results["a"].error is error
    assert trip.run.results["a"].steps == 3
    own = [event for event in trip.events if isinstance(event, JobFailed | JobEnded) and event.name == "a"]
    assert own == [JobFailed("a", error), JobEnded("a", Outcome.FAILED, 3)]


def test_a_divergence_is_an_outcome_without_an_error():
    trip = Trip(pair(), FakeAdapter({"a": Script(loss=lambda step: math.nan)})).go()
    assert trip.outcomes() == {"a": "diverged", "b": "completed"}
    assert trip.run.results["a"].error is None
    assert trip.seen(JobFailed) == []


@pytest.mark.parametrize("strategy", ["auto", "in_turn"])
def test_on_error_raise_raises_at_the_first(strategy: str):
    error = RuntimeError("mine")
    trip = Trip(pair(), FakeAdapter({"a": Script(raises_at=1, error=error)}), strategy, on_error="raise")
    with pytest.raises(RuntimeError, match="mine") as caught:
        trip.go()
    assert caught.value is error
    assert trip.outcomes() == {"a": "failed"}
    assert trip.seen(GroupFellBack) == []
    assert trip.held_bytes() == 0
    assert all(session.closed for session in trip.adapter.sessions)


def test_a_job_whose_session_cannot_be_opened_fails_alone():
    error = OSError("no driver")
    trip = Trip(pair(), FakeAdapter(solo_errors={"a": error}), "in_turn").go()
    assert trip.outcomes() == {"a": "failed", "b": "completed"}
    assert trip.run.results["a"].error is error


def test_a_job_whose_session_finds_no_room_is_opened_alone_and_then_given_up():
    trip = Trip(pair(), FakeAdapter(solo_errors={"a": MemoryError("no room")}), "interleaved").go()
    assert trip.outcomes() == {"a": "out_of_memory", "b": "completed"}
    assert "no room" in str(trip.run.results["a"].error)
    (fell,) = [event for event in trip.events if isinstance(event, GroupFellBack)]
    assert fell.names == ("a",)
    assert trip.held_bytes() == 0


def test_rejected_jobs_fail_first_and_the_rest_runs():
    error = KeyError("in its factory")
    trip = Trip([job("a", config={"lr": 1}), job("b")], FakeAdapter(), rejected={"a": error}).go()
    assert trip.outcomes() == {"a": "failed", "b": "completed"}
    assert trip.events[:2] == [JobFailed("a", error), JobEnded("a", Outcome.FAILED, 0)]
    assert (trip.run.results["a"].error, trip.run.results["a"].config) == (error, {"lr": 1})


def test_a_rejected_job_raises_when_asked_to():
    trip = Trip(pair(), FakeAdapter(), rejected={"a": KeyError("mine")}, on_error="raise")
    with pytest.raises(KeyError, match="mine"):
        trip.go()
    assert trip.adapter.sessions == []


def test_a_job_whose_validation_raises_fails_alone():
    error = ValueError("of another shape")
    jobs = [job(name, validation_data=([0], [0])) for name in "ab"]
    trip = Trip(jobs, FakeAdapter({"a": Script(validation_error=error)}), "in_turn").go()
    assert trip.outcomes() == {"a": "failed", "b": "completed"}
    assert trip.run.results["a"].error is error


# Falling back


def test_a_group_that_is_unfit_falls_back_and_says_so():
    trip = Trip(pair(), FakeAdapter(mismatches=["'fc.weight' differs"])).go()
    assert trip.seen(GroupFellBack) == [GroupFellBack(0, ("a", "b"), "'fc.weight' differs")]
    assert [type(session) for session in trip.adapter.sessions] == [
        FakeFusedSession,
        FakeSession,
        FakeSession,
    ]
    assert trip.adapter.sessions[0].closed
    assert trip.outcomes() == {"a": "completed", "b": "completed"}
    result = trip.run.results["b"]
    assert (result.strategy, result.reason) == ("interleaved", "fell back from fused: 'fc.weight' differs")
    assert result.steps == 4


def test_a_group_that_cannot_be_opened_falls_back():
    trip = Trip(pair(), FakeAdapter(open_error=RuntimeError("CUDA says no"))).go()
    assert trip.seen(GroupFellBack) == [GroupFellBack(0, ("a", "b"), "RuntimeError: CUDA says no")]
    assert trip.outcomes() == {"a": "completed", "b": "completed"}


def test_members_that_had_ended_keep_their_results_when_the_rest_falls_back():
    adapter = FakeAdapter(mismatches=[None, "drifted"])
    trip = Trip([job("a", epochs=1), job("b"), job("c")], adapter, verify=True).go()
    assert trip.seen(GroupFellBack) == [GroupFellBack(0, ("b", "c"), "drifted")]
    assert {name: result.strategy for name, result in trip.run.results.items()} == {
        "a": "fused",
        "b": "interleaved",
        "c": "interleaved",
    }
    assert sorted(event.name for event in trip.seen(JobEnded)) == ["a", "b", "c"]


def test_a_group_that_falls_back_in_the_middle_is_abandoned_and_starts_again():
    adapter = FakeAdapter({"a": Script(loss=float)}, mismatches=[None, "drifted"])
    trip = Trip(pair(epochs=3), adapter, verify=True).go()
    words = [word for word, *_ in adapter.sessions[0].calls]
    assert words[-2:] == ["abandon", "close"]
    assert trip.run.results["a"].history == {"loss": (0.5, 2.5, 4.5)}
    assert trip.run.results["a"].steps == 6


def test_only_a_group_that_fails_is_abandoned():
    for adapter in (FakeAdapter(), FakeAdapter({"a": Script(raises_at=1)})):
        Trip(pair(), adapter).go()
        assert adapter.sessions[0].asked("abandon") == []


def test_fused_that_was_asked_for_never_falls_back():
    trip = Trip(pair(), FakeAdapter(mismatches=["'fc.weight' differs"]), "fused")
    with pytest.raises(FusionError, match=r"group of 'a' cannot go on: 'fc\.weight' differs"):
        trip.go()
    assert len(trip.adapter.sessions) == 1
    assert trip.adapter.sessions[0].closed
    assert trip.held_bytes() == 0


def test_one_failing_member_does_not_make_a_group_fall_back():
    trip = Trip(pair(), FakeAdapter({"a": Script(raises_at=1)}), "fused").go()
    assert trip.outcomes() == {"a": "failed", "b": "completed"}
    assert trip.seen(GroupFellBack) == []


# Memory


def test_a_group_holds_its_memory_while_it_runs_and_gives_it_back():
    held: list[int] = []
    trips: list[Trip] = []
    watched = [lambda event: held.append(trips[0].held_bytes())]
    jobs = [job("a", "net", callbacks=watched), job("b", "net"), job("c", "other", callbacks=watched)]
    trips.append(Trip(jobs, FakeAdapter()))
    trips[0].go()
    assert held[0] == max(held) == 30  # until the first of the two groups ends
    assert trips[0].held_bytes() == 0


def test_what_does_not_fit_beside_the_others_waits_until_it_does():
    held: list[int] = []
    trips: list[Trip] = []
    watched = [lambda event: held.append(trips[0].held_bytes())]
    jobs = [job("a", "net", callbacks=watched), job("b", "net"), job("c", "other", callbacks=watched)]
    trips.append(Trip(jobs, FakeAdapter(), free_bytes=25))
    trips[0].go()
    assert held == [20, 20, 10, 10]
    assert trips[0].outcomes() == dict.fromkeys("abc", "completed")


def test_more_than_there_is_runs_all_the_same_and_is_counted_as_all_there_is():
    held: list[int] = []
    trips: list[Trip] = []
    jobs = [job("a", callbacks=[lambda event: held.append(trips[0].held_bytes())], epochs=1)]
    trips.append(Trip(jobs, FakeAdapter(), free_bytes=5))
    trips[0].go()
    assert held == [5]
    assert trips[0].held_bytes() == 0


# Ctrl-C


def test_ctrl_c_ends_the_running_group_and_leaves_the_rest():
    def ctrl_c(event: EpochEnded) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    trip = Trip([job("a", "net", callbacks=[ctrl_c]), job("b", "net"), job("c", "other")], FakeAdapter())
    with pytest.raises(KeyboardInterrupt):
        trip.go()
    assert trip.outcomes() == {"a": "interrupted", "b": "interrupted", "c": "interrupted"}
    assert {name: trip.run.results[name].steps for name in "ab"} == {"a": 2, "b": 2}
    assert trip.run.results["a"].model == {"weights": 2}
    assert trip.run.results["a"].history == {"loss": (1.0,)}
    assert all(session.closed for session in trip.adapter.sessions)
    assert trip.held_bytes() == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_is_raised_at_once():
    with Pause() as pause:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            pause.check()


def test_without_ctrl_c_there_is_nothing_to_raise():
    with Pause() as pause:
        assert pause.check() is None
