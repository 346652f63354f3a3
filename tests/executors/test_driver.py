"""The driver on scripted sessions: epochs, histories, early stopping, and one row's end that harms no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import carpool
from carpool.adapters.base import JobState, MetricRow
from carpool.errors import OptionError
from carpool.events import EpochEnded, Event, GroupAdvanced, GroupResized, GroupVerified
from carpool.executors import driver as module
from carpool.executors.driver import Driver, Unfit
from carpool.executors.member import Member
from carpool.fidelity import Proof
from carpool.planning.cursor import MAX_CHUNK_STEPS, Course
from carpool.result import Outcome
from carpool.testing import FakeFusedSession, FakeSession, Script


@dataclass
class Ended:
    """What the driver handed to `finish`."""

    member: Member
    outcome: Outcome
    state: JobState
    error: BaseException | None


@dataclass
class Stage:
    """A driver on a session of scripted members, and everything it said."""

    session: FakeSession | FakeFusedSession
    members: Sequence[Member]
    ended: dict[str, Ended] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.driver = Driver(self.session, self.members, self._finish, self.events.append, group=7)

    def _finish(
        self, member: Member, outcome: Outcome, state: JobState | None, error: BaseException | None = None
    ) -> None:
        assert member.name not in self.ended, f"{member.name} ended twice"
        assert state is not None
        self.ended[member.name] = Ended(member, outcome, state, error)

    def run(self, verify: bool = False) -> Stage:
        for _ in self.driver.run(verify):
            pass
        assert self.driver.unfinished == ()
        return self

    def outcomes(self) -> dict[str, str]:
        return {name: end.outcome.word for name, end in self.ended.items()}

    def history(self, name: str) -> Mapping[str, list[float]]:
        return self.ended[name].member.history

    def seen(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def member(
    name: str, course: tuple[int, int, int] = (8, 4, 3), ahead: bool = False, **options: Any
) -> Member:
    """A member with validation data, or one for which nothing is decided between epochs: it may run ahead."""
    validation = None if ahead else ([0], [0])
    job = carpool.Job("net", ([0], [0]), name=name, loss=max, validation_data=validation, **options)
    return Member(job, Course(*course))


def fused(
    scripts: Mapping[str, Script],
    courses: Mapping[str, tuple[int, int, int]] | None = None,
    ahead: bool = False,
    **settings: Any,
) -> Stage:
    """Members named like their scripts; two batches of 4 and three epochs unless told."""
    courses = courses or {}
    members = [member(name, courses.get(name, (8, 4, 3)), ahead) for name in scripts]
    return Stage(FakeFusedSession(list(scripts.values()), **settings), members)


def solo(script: Script, course: tuple[int, int, int] = (8, 4, 3), **options: Any) -> Stage:
    return Stage(FakeSession(script), [member("a", course, **options)])


def scripted(values: Sequence[float], batches: int = 2) -> Callable[[int], float]:
    """A metric that is values[e] after epoch e."""
    return lambda steps: values[steps // batches - 1]


both_ways = pytest.mark.parametrize("ahead", [False, True], ids=["epoch by epoch", "ahead"])


# Chunks


def test_chunks_never_cross_an_epochs_end():
    courses = {"a": (10, 4, 2), "b": (7, 4, 3), "c": (600 * 4, 4, 1)}
    stage = fused({name: Script() for name in courses}, courses).run()
    for chunk in stage.session.chunks:
        for row, cursor in zip(chunk.rows, chunk.cursors, strict=True):
            course = stage.members[row].course
            assert cursor.batch + chunk.steps <= course.batches
            assert {course.size(cursor.batch + i) for i in range(chunk.steps)} == {chunk.size}
            assert chunk.steps <= MAX_CHUNK_STEPS


def waiting(stage: Stage) -> list[int]:
    """How many chunks were enqueued and unread, each time one was read."""
    enqueued, counts = 0, []
    for word, *_ in stage.session.calls:
        if word == "metrics":
            counts.append(enqueued)
        enqueued += {"advance": 1, "metrics": -1}.get(word, 0)
    return counts


def test_losses_are_read_where_an_epoch_ends():
    assert waiting(solo(Script(), (8, 4, 4)).run()) == [1, 1, 1, 1]
    assert waiting(solo(Script(), (4 * 300, 4, 2)).run()) == [2, 1, 2, 1]


def test_where_nothing_is_decided_the_session_runs_ahead_by_a_few_chunks():
    stage = solo(Script(loss=float), (8, 4, 6), ahead=True).run()
    assert waiting(stage) == [3, 3, 3, 3, 2, 1]
    assert stage.history("a") == {"loss": [2 * epoch + 0.5 for epoch in range(6)]}


@pytest.mark.parametrize(
    "options",
    [{"stop": carpool.EarlyStopping("loss", patience=9)}, {"callbacks": [print]}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_decided_between_epochs_is_decided_before_the_next(options: dict[str, Any]):
    assert waiting(solo(Script(), (8, 4, 4), ahead=True, **options).run()) == [1, 1, 1, 1]


def test_a_session_that_steps_schedules_at_an_epochs_end_is_told_before_the_next():
    stage = solo(Script(), (8, 4, 4), ahead=True)
    stage.session.schedules = True
    assert waiting(stage.run()) == [1, 1, 1, 1]


def test_one_member_that_decides_makes_the_group_wait_at_its_epochs():
    members = [member("a", (8, 4, 4), ahead=True), member("b", (8, 4, 4))]
    assert waiting(Stage(FakeFusedSession([Script(), Script()]), members).run()) == [1, 1, 1, 1]


@both_ways
def test_unequal_lengths_and_epochs_each_run_their_own_steps(ahead: bool):
    courses = {"a": (10, 4, 2), "b": (8, 4, 5), "c": (3, 4, 1)}
    stage = fused({name: Script() for name in courses}, courses, ahead).run()
    assert stage.outcomes() == dict.fromkeys(courses, "completed")
    for name, (length, size, epochs) in courses.items():
        end = stage.ended[name]
        assert end.state.cursor.step == end.member.steps == Course(length, size, epochs).steps
        assert len(end.member.history["loss"]) == epochs
        assert end.state.cursor.epoch == epochs


def test_every_chunk_is_reported_in_member_steps():
    stage = fused({"a": Script(), "b": Script()}, {"a": (10, 4, 2), "b": (8, 4, 2)}).run()
    advanced = stage.seen(GroupAdvanced)
    assert sum(event.steps for event in advanced) == 3 * 2 + 2 * 2
    assert {event.group for event in advanced} == {7}


def test_it_pauses_after_every_chunk():
    stage = solo(Script(), (10, 4, 2))
    pauses = sum(1 for _ in stage.driver.run())
    assert pauses == len(stage.session.chunks) == 4


# Histories


@both_ways
def test_an_epochs_loss_is_weighted_by_batch_size(ahead: bool):
    stage = solo(Script(loss=lambda step: (1.0, 2.0, 10.0)[step % 3]), (9, 4, 2), ahead=ahead).run()
    assert stage.history("a") == {"loss": [pytest.approx((4 * 1 + 4 * 2 + 1 * 10) / 9)] * 2}


def test_every_epoch_starts_its_mean_at_zero():
    stage = solo(Script(loss=float), (8, 4, 3)).run()
    assert stage.history("a") == {"loss": [0.5, 2.5, 4.5]}


def test_only_rows_with_validation_data_have_validation_metrics():
    scripts = {"a": Script(validation=scripted([3.0, 2.0, 1.0])), "b": Script()}
    stage = fused(scripts).run()
    assert stage.history("a")["val_loss"] == [3.0, 2.0, 1.0]
    assert "val_loss" not in stage.history("b")
    assert stage.session.asked("evaluate") == [[(0, 1)]] * 3


def test_the_session_hears_the_epochs_metrics_after_evaluation():
    stage = solo(Script(loss=float, validation=scripted([3.0, 2.0, 1.0]))).run()
    assert stage.session.asked("end_epoch") == [
        [0, {"loss": mean, "val_loss": val}] for mean, val in ((0.5, 3.0), (2.5, 2.0), (4.5, 1.0))
    ]
    words = [word for word, *_ in stage.session.calls if word in ("evaluate", "end_epoch")]
    assert words == ["evaluate", "end_epoch"] * 3


def test_epochs_are_reported_in_order_with_their_metrics():
    stage = fused({"a": Script(loss=float), "b": Script()}).run()
    epochs = [(event.epoch, dict(event.metrics)) for event in stage.seen(EpochEnded) if event.name == "a"]
    assert epochs == [(0, {"loss": 0.5}), (1, {"loss": 2.5}), (2, {"loss": 4.5})]


# Early stopping


def stopping(values: Sequence[float], **policy: Any) -> Stage:
    """One member of ten epochs whose validation loss goes through the values."""
    script = Script(validation=scripted(values))
    return solo(script, (8, 4, 10), stop=carpool.EarlyStopping("val_loss", **policy)).run()


@pytest.mark.parametrize(("patience", "epochs"), [(0, 3), (1, 3), (2, 4), (5, 7)])
def test_patience_counts_epochs_without_improvement(patience: int, epochs: int):
    stage = stopping([3.0, 2.0] + [2.5] * 8, patience=patience)
    assert stage.outcomes() == {"a": "stopped"}
    assert len(stage.history("a")["val_loss"]) == epochs
    assert stage.ended["a"].member.steps == 2 * epochs


def test_an_improvement_starts_patience_anew():
    stage = stopping([3.0, 3.1, 2.0, 2.1, 1.0, 1.1, 1.2] + [9.0] * 3, patience=2)
    assert len(stage.history("a")["val_loss"]) == 7


def test_min_delta_is_what_counts_as_improvement():
    values = [3.0, 2.95, 2.9, 2.85, 2.8, 2.75, 2.7, 2.65, 2.6, 2.55]
    assert stopping(values, patience=2).outcomes() == {"a": "completed"}
    assert len(stopping(values, patience=2, min_delta=0.5).history("a")["val_loss"]) == 3


def test_the_best_weights_are_kept_and_come_back():
    stage = stopping([3.0, 1.0, 2.0, 1.5] + [9.0] * 6, patience=2, restore_best=True)
    end = stage.ended["a"]
    assert end.outcome is Outcome.STOPPED
    assert end.state.model == {"weights": 4}, "the weights after the second epoch of two batches"
    assert end.member.steps == 8
    assert end.member.holding == (1, {"loss": 1.0, "val_loss": 1.0})
    calls = [(word, *rest) for word, *rest in stage.session.calls if word in ("keep", "revert") and rest[0]]
    assert calls == [("keep", (0,)), ("keep", (0,)), ("revert", (0,))]
    assert stage.session.calls.index(("revert", (0,))) < stage.session.calls.index(("state", (0,)))


def test_the_best_weights_come_back_when_all_epochs_ran_too():
    stage = stopping([1.0] + [2.0 + i for i in range(9)], patience=99, restore_best=True)
    assert stage.outcomes() == {"a": "completed"}
    assert stage.ended["a"].state.model == {"weights": 2}
    assert stage.ended["a"].member.holding.epoch == 0
    assert stage.ended["a"].member.holding.metrics["val_loss"] == 1.0


def test_patience_that_ends_with_the_last_epoch_is_a_job_completed():
    stage = stopping([1.0] * 8 + [0.5, 2.0], patience=1)
    assert stage.outcomes() == {"a": "stopped"}
    stage = stopping([10.0 - i for i in range(9)] + [99.0], patience=1)
    assert stage.outcomes() == {"a": "completed"}


def test_without_restore_best_nothing_is_kept():
    stage = stopping([1.0] + [2.0] * 9, patience=2)
    assert not any(rows for word in ("keep", "revert") for (rows,) in stage.session.asked(word))
    assert stage.ended["a"].state.model == {"weights": 6}
    assert stage.ended["a"].member.holding.epoch == 2


def test_who_ends_within_an_epoch_holds_no_epochs_weights():
    """Interrupted, diverged or failed: the metrics are the last that were measured, and no epoch is named for them."""
    one = member("a")
    assert one.holding == (None, {})
    one.count(MetricRow(0, 2, 8, {"loss": 16.0}))
    one.end_epoch(one.epoch_metrics())
    assert one.holding == (0, {"loss": 2.0})
    one.count(MetricRow(0, 1, 4, {"loss": 4.0}))
    assert one.holding == (None, {"loss": 2.0})
    raises = Script(raises_at=3, error=RuntimeError("mine"))
    for script in (raises, Script(loss=lambda step: math.nan if step == 3 else 1.0)):
        end = Stage(FakeFusedSession([script]), [member("a")]).run().ended["a"]
        assert end.outcome in (Outcome.FAILED, Outcome.DIVERGED)
        assert end.member.holding.epoch is None
        assert end.member.holding.metrics.keys() == {"loss"}


def test_a_metric_that_not_every_epoch_has_is_found_by_its_epoch():
    one = member("a")
    for epoch in range(5):
        one.end_epoch({"loss": float(epoch)} | ({"val_loss": 10.0 + epoch} if epoch % 2 else {}))
    assert one.history["val_loss"] == [11.0, 13.0]
    found = {}
    for epoch in range(5):
        one.restored = epoch
        found[epoch] = one.holding.metrics
    assert found[0] == {"loss": 0.0}
    assert [found[epoch]["val_loss"] for epoch in (1, 2, 3, 4)] == [11.0, 11.0, 13.0, 13.0]


def test_a_metric_that_was_never_sound_leaves_nothing_to_restore():
    stage = stopping([math.nan] * 10, patience=1, restore_best=True)
    assert stage.outcomes() == {"a": "stopped"}
    assert stage.ended["a"].state.model == {"weights": 2}


def test_a_row_that_stops_early_leaves_the_others_alone():
    scripts = {"a": Script(validation=scripted([1.0, 2.0, 3.0])), "b": Script(loss=float)}
    members = [member("a", stop=carpool.EarlyStopping(restore_best=True)), member("b")]
    stage = Stage(FakeFusedSession(list(scripts.values())), members).run()
    assert stage.outcomes() == {"a": "stopped", "b": "completed"}
    assert stage.history("b") == {"loss": [0.5, 2.5, 4.5]}
    assert stage.ended["a"].state.model == {"weights": 2}
    assert stage.ended["b"].state.model == {"weights": 6}


def test_watching_a_metric_that_never_comes_fails_only_that_job():
    members = [member("a", stop=carpool.EarlyStopping("val_loss")), member("b")]
    stage = Stage(FakeFusedSession([Script(), Script()]), members).run()
    assert stage.outcomes() == {"a": "failed", "b": "completed"}
    assert isinstance(stage.ended["a"].error, OptionError)


# Divergence


@both_ways
def test_divergence_ends_one_row_only(ahead: bool):
    courses = dict.fromkeys("ab", (8, 4, 6))
    diverging = Script(loss=lambda step: math.nan if step == 3 else float(step))
    sound = fused({"a": Script(loss=float), "b": Script(loss=float)}, courses, ahead).run()
    broken = fused({"a": Script(loss=float), "b": diverging}, courses, ahead).run()
    assert broken.outcomes() == {"b": "diverged", "a": "completed"}
    assert broken.history("a") == sound.history("a")
    assert broken.history("b") == {"loss": [0.5]}, "the epoch in which it diverged is not counted"
    end = broken.ended["b"]
    assert end.state.model == {"weights": 3}
    assert end.state.cursor.step == end.member.steps == 3


def test_divergence_deep_in_a_long_epoch_is_seen_when_the_epoch_ends():
    script = Script(loss=lambda step: math.inf if step == 300 else 1.0)
    stage = solo(script, (4 * 600, 4, 2)).run()
    assert stage.outcomes() == {"a": "diverged"}
    assert stage.ended["a"].member.steps == 300
    assert len(stage.session.chunks) == 3


# Failures


@both_ways
def test_a_row_that_raises_fails_alone_and_the_others_go_on_from_there(ahead: bool):
    sound = fused({"a": Script(loss=float), "b": Script(loss=float)}, ahead=ahead).run()
    error = ZeroDivisionError("mine")
    raising = Script(loss=float, raises_at=3, error=error)
    broken = fused({"a": Script(loss=float), "b": raising}, ahead=ahead).run()
    assert broken.outcomes() == {"b": "failed", "a": "completed"}
    assert broken.ended["b"].error is error
    assert broken.ended["b"].state.cursor.step == broken.ended["b"].member.steps == 3
    assert broken.history("a") == sound.history("a")
    assert broken.history("b") == {"loss": [0.5]}
    after = broken.session.chunks[2]
    assert (after.rows, after.cursors[0].epoch, after.cursors[0].batch, after.cursors[0].step) == (
        (0,),
        1,
        1,
        3,
    )


def test_a_row_that_raises_at_once_has_no_history():
    stage = fused({"a": Script(raises_at=0), "b": Script()}).run()
    assert stage.history("a") == {}
    assert stage.outcomes() == {"a": "failed", "b": "completed"}


def test_rows_that_raise_in_the_same_step_fail_together():
    stage = fused({"a": Script(raises_at=1), "b": Script(), "c": Script(raises_at=1)}).run()
    assert stage.outcomes() == {"a": "failed", "c": "failed", "b": "completed"}


def test_a_row_alone_that_raises_ends_its_session():
    stage = solo(Script(raises_at=2)).run()
    assert stage.outcomes() == {"a": "failed"}
    assert stage.history("a") == {"loss": [1.0]}


def test_a_row_that_diverged_in_the_chunk_in_which_it_raises_has_diverged():
    late = Script(loss=lambda step: math.nan if step == 0 else 1.0, raises_at=1)
    stage = fused({"a": late, "b": Script(loss=float, raises_at=1)}).run()
    assert stage.outcomes() == {"a": "diverged", "b": "failed"}


def test_a_failed_row_is_free_again_so_that_repacking_fits():
    scripts = {name: Script(raises_at=1) for name in "abcde"}
    scripts |= {name: Script() for name in "fgh"}
    courses = {"f": (8, 4, 1), "g": (8, 4, 50), "h": (8, 4, 50)}
    stage = fused(scripts, courses, launch_s=1.0, prepare_s=0.0).run()
    assert stage.outcomes() == dict.fromkeys("abcde", "failed") | dict.fromkeys("fgh", "completed")
    assert [(event.old_width, event.new_width) for event in stage.seen(GroupResized)] == [(8, 2)]


def test_a_row_whose_validation_raises_fails_alone():
    error = ValueError("of another shape")
    scripts = {
        "a": Script(validation=scripted([3.0, 2.0, 1.0])),
        "b": Script(validation_error=error),
        "c": Script(validation=scripted([3.0, 2.0, 1.0])),
    }
    stage = fused(scripts).run()
    assert stage.outcomes() == {"b": "failed", "a": "completed", "c": "completed"}
    assert stage.ended["b"].error is error
    assert stage.history("a")["val_loss"] == stage.history("c")["val_loss"] == [3.0, 2.0, 1.0]


def test_a_row_whose_schedule_raises_fails_alone():
    error = KeyError("no such metric")
    stage = fused({"a": Script(schedule_error=error), "b": Script(loss=float)}).run()
    assert stage.outcomes() == {"a": "failed", "b": "completed"}
    assert stage.ended["a"].error is error
    assert stage.ended["a"].member.steps == 2
    assert stage.history("b") == {"loss": [0.5, 2.5, 4.5]}


# Callbacks


def test_callbacks_hear_every_epoch_once_and_in_order():
    heard: list[EpochEnded] = []
    members = [member("a", callbacks=[heard.append]), member("b")]
    stage = Stage(FakeFusedSession([Script(loss=float), Script()]), members).run()
    assert [(event.name, event.epoch, event.metrics["loss"]) for event in heard] == [
        ("a", 0, 0.5),
        ("a", 1, 2.5),
        ("a", 2, 4.5),
    ]
    assert heard == [event for event in stage.seen(EpochEnded) if event.name == "a"]


def test_a_callback_that_raises_fails_only_its_job():
    error = ValueError("in a callback")

    def picky(event: EpochEnded) -> None:
        if event.epoch == 1:
            raise error

    members = [member("a", callbacks=[picky]), member("b")]
    stage = Stage(FakeFusedSession([Script(loss=float), Script(loss=float)]), members).run()
    assert stage.outcomes() == {"a": "failed", "b": "completed"}
    assert stage.ended["a"].error is error
    assert stage.history("a") == {"loss": [0.5, 2.5]}
    assert stage.history("b") == {"loss": [0.5, 2.5, 4.5]}


# Interruption


def test_an_interrupt_ends_everyone_where_they_stand():
    stage = fused({"a": Script(loss=float), "b": Script(loss=float)}, {"a": (8, 4, 3), "b": (10, 4, 3)})
    running = stage.driver.run()
    for _ in range(3):
        next(running)
    stage.driver.interrupt()
    assert stage.outcomes() == {"a": "interrupted", "b": "interrupted"}
    assert {name: end.state.cursor.step for name, end in stage.ended.items()} == {"a": 4, "b": 5}
    assert stage.history("a") == {"loss": [0.5, 2.5]}
    assert stage.driver.unfinished == ()


def test_an_interrupt_counts_what_was_enqueued():
    stage = solo(Script(), (4 * 600, 4, 1))
    next(stage.driver.run())
    stage.driver.interrupt()
    end = stage.ended["a"]
    assert end.member.steps == end.state.cursor.step == 256
    assert end.member.history == {}


def test_an_interrupt_ends_the_epochs_that_were_enqueued():
    stage = solo(Script(loss=float), (8, 4, 6), ahead=True)
    running = stage.driver.run()
    for _ in range(2):
        next(running)
    assert stage.seen(EpochEnded) == []
    stage.driver.interrupt()
    assert stage.history("a") == {"loss": [0.5, 2.5]}
    assert stage.ended["a"].state.cursor.epoch == 2


# Checking


def test_the_first_step_of_every_shape_is_checked_before_anything_counts():
    stage = fused({"a": Script(), "b": Script(), "c": Script()}, {"c": (3, 4, 3)}).run()
    words = [word for word, *_ in stage.session.calls]
    assert words[:3] == ["check", "check", "advance"]
    assert [(rows, chunk.size) for chunk, rows in stage.session.asked("check")] == [((0, 1), 4), ((2,), 3)]
    assert [event.checked for event in stage.seen(GroupVerified)] == [2, 1]


def test_a_row_alone_is_not_checked():
    assert not solo(Script()).run(verify=True).seen(GroupVerified)


@pytest.mark.parametrize("proof", list(Proof))
def test_what_was_verified_is_reported_with_its_proof(proof: Proof):
    stage = fused({"a": Script(), "b": Script()}, proof=proof).run()
    assert [(event.checked, event.proof) for event in stage.seen(GroupVerified)] == [(2, proof)]


def test_what_was_not_verified_is_not_reported_as_verified():
    assert not fused({"a": Script(), "b": Script()}, proof=None).run(verify=True).seen(GroupVerified)


def test_a_mismatch_at_the_first_step_is_unfit_and_nothing_ran():
    stage = fused({"a": Script(), "b": Script()}, mismatches=["'fc.weight' differs"])
    with pytest.raises(Unfit, match=r"'fc\.weight' differs"):
        stage.run()
    assert not stage.seen(GroupVerified)
    assert stage.session.chunks == []
    assert stage.ended == {}


def test_a_wide_group_is_checked_from_its_first_row_to_its_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FIRST_CHECKED", 5)
    stage = fused({str(i): Script() for i in range(11)}).run()
    assert [rows for _, rows in stage.session.asked("check")] == [(0, 2, 5, 7, 10)]


def test_verifying_goes_on_with_other_rows_each_epoch():
    stage = fused({str(i): Script() for i in range(10)}, {str(i): (8, 4, 4) for i in range(10)}).run(
        verify=True
    )
    first, *later = [rows for _, rows in stage.session.asked("check")]
    assert first == tuple(range(10))
    assert later == [(4, 5, 6, 7), (8, 9, 0, 1), (2, 3, 4, 5)]


def test_verifying_goes_on_with_rows_that_begin_an_epoch():
    """In the middle of an epoch a row may hold gradients of batches before (`accumulate`), which its step alone knows nothing of."""
    courses = {"a": (20, 4, 3), "b": (12, 4, 3), "c": (20, 4, 3)}
    stage = fused({name: Script() for name in courses}, courses).run(verify=True)
    _, *later = stage.session.asked("check")
    assert len(later) > 2
    for chunk, rows in later:
        cursors = dict(zip(chunk.rows, chunk.cursors, strict=True))
        assert all(cursors[row].batch == 0 for row in rows)


def test_without_verify_only_the_first_step_is_checked():
    assert len(fused({"a": Script(), "b": Script()}).run().session.asked("check")) == 1


def test_a_mismatch_while_verifying_is_unfit():
    stage = fused({"a": Script(), "b": Script()}, mismatches=[None, None, "drifted"])
    with pytest.raises(Unfit, match="drifted"):
        stage.run(verify=True)
    assert {end.cursor.epoch for end in stage.driver.unfinished} == {2}


def test_a_row_that_raises_in_the_first_check_fails_alone():
    stage = fused({"a": Script(check_raises_at=0), "b": Script(loss=float)}).run()
    assert stage.outcomes() == {"a": "failed", "b": "completed"}
    assert stage.history("b") == {"loss": [0.5, 2.5, 4.5]}


def test_after_a_row_raised_in_the_first_check_the_others_are_still_checked():
    stage = fused({"a": Script(check_raises_at=0), "b": Script()}, mismatches=["differs"])
    with pytest.raises(Unfit):
        stage.run()


def test_a_row_that_raises_in_a_later_check_fails_alone():
    stage = fused({"a": Script(check_raises_at=2), "b": Script(loss=float)}).run(verify=True)
    assert stage.outcomes() == {"a": "failed", "b": "completed"}
    assert stage.ended["a"].member.steps == 2
    assert stage.history("b") == {"loss": [0.5, 2.5, 4.5]}


@both_ways
def test_a_row_that_turns_out_diverged_before_a_check_is_not_advanced_again(ahead: bool):
    diverging = Script(loss=lambda step: math.nan if step == 3 else 1.0)
    courses = {"a": (10, 4, 3), "b": (2, 4, 3)}
    stage = fused({"a": diverging, "b": Script()}, courses, ahead).run(verify=True)
    assert stage.outcomes() == {"a": "diverged", "b": "completed"}
    assert stage.ended["a"].member.steps == 3


# Repacking


@both_ways
def test_repacking_moves_the_rows_and_everyone_goes_on(ahead: bool):
    courses = {str(i): (8, 4, 1) for i in range(8)} | {"2": (8, 4, 40), "5": (8, 4, 60)}
    scripts = {name: Script(loss=float) for name in courses}
    stage = fused(scripts, courses, ahead, launch_s=1.0, prepare_s=10.0).run()
    assert stage.outcomes() == dict.fromkeys(courses, "completed")
    assert [(e.group, e.old_width, e.new_width) for e in stage.seen(GroupResized)] == [(7, 8, 2), (7, 2, 1)]
    assert stage.ended["2"].member.steps == 80
    assert stage.ended["5"].member.steps == 120
    assert stage.history("5")["loss"] == [2 * epoch + 0.5 for epoch in range(60)]
    assert {chunk.rows for chunk in stage.session.chunks[1:]} == {(0, 1), (0,)}


def test_repacking_that_does_not_pay_does_not_happen():
    courses = {str(i): (8, 4, 1) for i in range(8)} | {"0": (8, 4, 4)}
    stage = fused({name: Script() for name in courses}, courses, launch_s=1.0, prepare_s=10.0).run()
    assert stage.session.asked("resize") == []
    assert stage.outcomes() == dict.fromkeys(courses, "completed")


# Leaving


def test_fused_rows_leave_and_a_solo_row_is_read():
    assert fused({"a": Script(), "b": Script()}).run().session.asked("leave") == [[(0, 1)]]
    assert solo(Script()).run().session.asked("state") == [[(0,)]]


def test_what_a_compiler_is_making_is_waited_for_between_turns():
    stage = fused({"a": Script(), "b": Script()})
    made: list[bool] = []
    stage.session.preparing = lambda chunk: (lambda: bool(made)) if not made else None  # type: ignore[method-assign]
    steps = stage.driver.run()
    ready = next(steps)
    assert not ready()
    assert not stage.session.calls
    made.append(True)
    assert ready()
    for _ in steps:
        pass
    assert stage.outcomes() == {"a": "completed", "b": "completed"}
