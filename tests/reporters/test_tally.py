"""The fold over events: counts, fractions and the leaderboard, without a clock or a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

from carpool.events import (
    EpochEnded,
    Event,
    GroupAdvanced,
    GroupCompiled,
    GroupFellBack,
    GroupResized,
    GroupStarted,
    GroupVerified,
    JobAdmitted,
    JobEnded,
    JobFailed,
    RunEnded,
    RunStarted,
)
from carpool.fidelity import Proof
from carpool.planning.plan import Plan
from carpool.reporters.lines import summary
from carpool.reporters.pace import Pace
from carpool.reporters.tally import State, Tally
from carpool.result import Outcome

MakePlan = Callable[..., Plan]


def tallied(events: Iterable[Event]) -> Tally:
    tally = Tally()
    for event in events:
        tally.take(event)
    return tally


def test_start_knows_every_job_and_group(plan_of: MakePlan) -> None:
    tally = tallied([RunStarted(plan_of(2, 3, rejected=("bad",)), "cpu", 150)])
    assert tally.counts == {State.WAITING: 6, State.RUNNING: 0, State.DONE: 0, State.FAILED: 1}
    assert [(group.jobs, group.total_steps, group.strategy) for group in tally.groups.values()] == [
        (3, 75, "fused")
    ] * 2
    assert tally.errors == {"bad": "ValueError: no data"}
    assert tally.fraction == 0.0


def test_a_job_is_in_one_state_at_a_time(plan_of: MakePlan) -> None:
    tally = tallied([RunStarted(plan_of(1, 3), "cpu", 75)])
    tally.take(JobAdmitted("s0,m0", 0, 200))
    tally.take(EpochEnded("s0,m1", 0, {"loss": 1.0}))  # an epoch that ends says that the job runs
    assert tally.counts[State.RUNNING] == 2
    tally.take(JobFailed("s0,m0", RuntimeError("boom")))
    tally.take(JobEnded("s0,m0", Outcome.FAILED, 3))  # the failure and the end are one job's
    tally.take(JobEnded("s0,m1", Outcome.STOPPED, 10))
    tally.take(JobEnded("s0,m2", Outcome.DIVERGED, 10))
    assert tally.counts == {State.WAITING: 0, State.RUNNING: 0, State.DONE: 1, State.FAILED: 2}
    assert tally.outcomes == {"failed": 1, "stopped": 1, "diverged": 1}
    assert tally.jobs["s0,m1"].word == "stopped"


def test_steps_nobody_will_run_leave_the_total(plan_of: MakePlan) -> None:
    tally = tallied([RunStarted(plan_of(1, 2), "cpu", 50), GroupAdvanced(0, 30)])
    assert tally.fraction == pytest.approx(0.6)
    tally.take(JobEnded("s0,m0", Outcome.STOPPED, 15))
    assert (tally.total_steps, tally.groups[0].total_steps) == (40, 40)
    assert tally.groups[0].fraction == pytest.approx(0.75)
    tally.take(JobEnded("s0,m1", Outcome.COMPLETED, 25))
    assert tally.groups[0].ended
    assert tally.groups[0].fraction == 1.0


def test_best_ranks_by_val_loss_and_leaves_out_the_unsound(plan_of: MakePlan) -> None:
    tally = tallied([RunStarted(plan_of(1, 5), "cpu", 125)])
    values = {"s0,m0": 0.5, "s0,m1": 0.1, "s0,m2": math.nan, "s0,m3": 0.3}
    for name, value in values.items():
        tally.take(EpochEnded(name, 0, {"loss": -value, "val_loss": value}))
    tally.take(JobFailed("s0,m1", RuntimeError("boom")))
    assert tally.metric == "val_loss"
    assert [job.name for job in tally.best(10)] == ["s0,m3", "s0,m0"]
    assert [job.name for job in tally.best(1)] == ["s0,m3"]


def test_a_metric_that_is_better_high_is_ranked_so(plan_of: MakePlan) -> None:
    tally = tallied([EpochEnded("a", 0, {"accuracy": 0.5}), EpochEnded("b", 0, {"accuracy": 0.9})])
    assert [job.name for job in tally.best(2)] == ["b", "a"]


def test_a_metric_of_unknown_direction_is_shown_and_ranks_nobody() -> None:
    events = [
        EpochEnded(name, 0, {"elbo": value}) for name, value in (("a", 0.5), ("b", 0.9), ("c", math.nan))
    ]
    tally = tallied(events)
    assert tally.best(2) == []
    assert [job.name for job in tally.leaders(2)] == ["a", "b"]
    assert "best" not in summary(tally, 1.0)


def test_a_job_that_put_earlier_weights_back_is_ranked_by_them() -> None:
    events = [EpochEnded("a", e, {"val_loss": v}) for e, v in enumerate((0.1, 0.9))]
    tally = tallied([*events, EpochEnded("b", 0, {"val_loss": 0.5})])
    assert [job.name for job in tally.best(2)] == ["b", "a"]
    tally.take(JobEnded("a", Outcome.STOPPED, 2, held={"val_loss": 0.1}))
    assert [job.name for job in tally.best(2)] == ["a", "b"]
    assert "best val_loss 0.1 (a)" in summary(tally, 1.0)


def test_group_notes_say_the_last_thing_that_happened(plan_of: MakePlan) -> None:
    tally = tallied([RunStarted(plan_of(1, 4), "cpu", 100), GroupStarted(0, ("s0,m0",), "fused")])
    assert (tally.groups[0].started, tally.groups[0].note) == (True, "preparing")
    told = {
        GroupCompiled(0, 8, 4, "compiled", 5.14): "compiled in 5.1 s",
        GroupCompiled(0, 8, 4, "traced", 0.5): "traced in 0.5 s",
        GroupCompiled(0, 8, 4, "resident", 0.2): "resident in 0.2 s",
        GroupVerified(0, 2, 3.1e-7): "verified 2 within 3.1e-07",
        GroupVerified(0, 2, 0.0, Proof.TRACES): "equal traces of 2",
        GroupFellBack(0, ("s0,m0",), "mismatch"): "one by one: mismatch",
        GroupResized(0, 4, 2): "repacked to 2",
    }
    for event, note in told.items():
        tally.take(event)
        assert tally.groups[0].note == note
    assert tally.compile_s == pytest.approx(5.84)


def test_end_keeps_the_runs_own_seconds() -> None:
    assert tallied([RunEnded(12.5)]).seconds == 12.5


def test_pace_forgets_what_is_older_than_its_window() -> None:
    pace = Pace(now=0.0)
    assert pace.at(0.0, 0) == 0.0
    assert pace.at(5.0, 50) == pytest.approx(10.0)
    assert pace.at(20.0, 2050) == pytest.approx(2000 / 15)
    assert pace.at(25.0, 2050) == pytest.approx(2000 / 20)
    assert pace.at(30.0, 2050) == 0.0
