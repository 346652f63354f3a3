"""Results: by place and by name, ranked, as text, as a frame, as a page and as files."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from carpool import Outcome, Result, Results
from carpool.errors import OptionError


def result(
    name: str, loss: float | None = None, outcome: Outcome = Outcome.COMPLETED, **fields: Any
) -> Result:
    history = {} if loss is None else {"loss": [9.0, loss]}
    return Result(name, outcome, **{"history": history, "steps": 10, **fields})


def three() -> Results:
    return Results([result("a", 0.5), result("b", 0.25), result("c", 0.75)], seconds=2.0)


# A sequence


def test_results_are_had_by_place_by_name_and_in_part():
    results = three()
    assert results[0].name == results["a"].name == "a"
    assert results[-1] is results["c"]
    assert [r.name for r in results[1:]] == ["b", "c"]
    assert isinstance(results[1:], Results)
    assert results[1:].seconds == 2.0
    assert [r.name for r in results] == ["a", "b", "c"]


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(KeyError, match=r"Received: 'z'\. Remedy: use one of a, b, c"):
        three()["z"]


def test_a_long_list_of_names_is_shortened():
    with pytest.raises(KeyError, match="use one of 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"):
        Results([result(str(i)) for i in range(20)])["z"]


def test_failed_are_those_that_raised_diverged_or_did_not_fit():
    results = Results(
        [result(outcome.word, outcome=outcome) for outcome in Outcome],
    )
    assert [r.name for r in results.failed] == ["diverged", "failed", "out_of_memory"]


def test_metrics_come_in_the_order_first_seen():
    results = Results([result("a", 1.0), result("b", history={"acc": [1.0], "loss": [2.0]})])
    assert results.metrics == ("loss", "acc")


def test_the_last_value_is_nan_where_there_is_none():
    assert result("a", 0.5).last("loss") == 0.5
    assert math.isnan(result("a").last("loss"))
    assert math.isnan(result("a", history={"loss": []}).last("loss"))


def test_every_outcome_has_a_word_and_a_sentence():
    assert [outcome.word for outcome in Outcome] == [
        "completed",
        "stopped",
        "diverged",
        "failed",
        "out_of_memory",
        "interrupted",
    ]
    assert all(" " in outcome.value for outcome in Outcome)


# The best


def test_the_best_is_the_smallest_loss_and_the_largest_accuracy():
    assert three().best("loss").name == "b"
    assert three().best("loss", mode="max").name == "c"
    accuracy = Results([result("a", history={"acc": [0.5]}), result("b", history={"acc": [0.75]})])
    assert accuracy.best("acc").name == "b"


def test_the_best_is_by_the_last_value():
    results = Results([result("a", history={"loss": [0.1, 0.9]}), result("b", history={"loss": [0.9, 0.8]})])
    assert results.best("loss").name == "b"


@pytest.mark.parametrize("metric", ["dice", "val_dice", "psnr", "mcc", "reward", "ndcg", "accuracy"])
def test_the_best_of_a_metric_that_is_better_higher_is_the_highest(metric: str):
    results = Results([result("a", history={metric: [0.5]}), result("b", history={metric: [0.75]})])
    assert results.best(metric).name == "b"
    assert [row["name"] for row in results.rows(sort=metric)] == ["b", "a"]


@pytest.mark.parametrize("metric", ["top5_error", "score_loss", "accuracy_loss"])
def test_the_best_of_an_error_is_the_lowest_whatever_else_its_name_holds(metric: str):
    results = Results([result("a", history={metric: [0.5]}), result("b", history={metric: [0.75]})])
    assert results.best(metric).name == "a"


def test_a_metric_of_unknown_direction_ranks_nothing_without_a_mode():
    """best, rows and table take mode=, and none of them guesses."""
    results = Results([result("a", history={"elbo": [0.5]}), result("b", history={"elbo": [0.75]})])
    for rank in (results.best, results.rows, results.table):
        with pytest.raises(OptionError, match="'elbo'"):
            rank("elbo")
    assert (results.best("elbo", "max").name, results.best("elbo", "min").name) == ("b", "a")
    assert [row["name"] for row in results.rows("elbo", mode="max")] == ["b", "a"]
    assert results.table("elbo", mode="max").splitlines()[1].startswith("b")
    with pytest.raises(OptionError, match="'up'"):
        results.rows("elbo", mode="up")


def test_a_mode_that_a_jobs_early_stopping_said_holds_for_its_metric():
    one = result("a", history={"elbo": [0.5]}, modes={"elbo": "max"})
    other = result("b", history={"elbo": [0.75]})
    assert Results([one, other]).best("elbo").name == "b"
    assert Results([one, other]).best("elbo", mode="min").name == "a"
    against = result("c", history={"elbo": [0.9]}, modes={"elbo": "min"})
    with pytest.raises(OptionError, match="'elbo'"):
        Results([one, other, against]).best("elbo")


def test_jobs_rank_by_the_weights_they_hold():
    """Not by the last epoch, where earlier weights were put back."""
    history = {"val_loss": [0.5, 0.1, 0.9]}
    restored = result("restored", history=history, epoch=1, held={"val_loss": 0.1})
    last = result("last", history={"val_loss": [0.5, 0.4, 0.3]}, epoch=2)
    results = Results([last, restored])
    assert results.best().name == "restored"
    assert (results.best().metric("val_loss"), results.best().last("val_loss")) == (0.1, 0.9)
    assert [(row["name"], row["epoch"], row["val_loss"]) for row in results.rows("val_loss")] == [
        ("restored", 1, 0.1),
        ("last", 2, 0.3),
    ]
    assert results.table().splitlines()[2].split() == ["restored", "completed", "10", "1", "0.1"]
    assert "<td>0.1</td>" in results._repr_html_()
    assert list(results.frame()["val_loss"]) == [0.3, 0.1]
    assert (restored.is_restored, last.is_restored) == (True, False)


def test_who_does_not_hold_what_it_trained_is_never_best():
    """As a job whose worker died at Ctrl-C: its history was told, its weights are as they came."""
    lost = result("lost", 0.0, Outcome.INTERRUPTED, held={})
    assert Results([lost, result("a", 0.5)]).best("loss").name == "a"


def test_a_metric_that_is_several_numbers_is_shown_and_not_ranked():
    several = result("x", history={"loss": [np.array([0.1, 0.2])]})
    assert Results([several, result("a", 0.5)]).best("loss").name == "a"
    assert "[0.1 0.2]" in Results([several]).table()


def test_a_metric_may_be_named_as_a_column_is():
    results = Results([result("a", history={"steps": [0.5]}, config={"steps": 3})])
    assert results.table().splitlines()[0].split(maxsplit=4) == [
        *["name", "outcome", "steps", "epoch"],
        "steps (metric)",
    ]
    assert (
        results.frame().loc["a"].to_dict() | {"config.steps": 3, "steps": 10}
        == results.frame().loc["a"].to_dict()
    )


@pytest.mark.parametrize(
    "unsound",
    [
        result("x", 0.0, Outcome.DIVERGED),
        result("x", 0.0, Outcome.FAILED),
        result("x", -math.inf),
        result("x", math.nan),
        result("x"),
    ],
    ids=["diverged", "failed", "infinite", "nan", "none"],
)
def test_unsound_jobs_are_never_best(unsound: Result):
    assert Results([unsound, result("a", 0.5)]).best("loss").name == "a"


@pytest.mark.parametrize("outcome", [Outcome.STOPPED, Outcome.INTERRUPTED])
def test_jobs_that_ended_early_can_be_best(outcome: Outcome):
    assert Results([result("x", 0.0, outcome), result("a", 0.5)]).best("loss").name == "x"


def test_an_unknown_metric_is_told_the_known_ones():
    with pytest.raises(OptionError, match=r"one of the metrics loss\. Received: 'val_loss'\. Remedy: "):
        three().best()


@pytest.mark.parametrize(
    ("known", "remedy"),
    [
        (["loss", "val_loss", "val_accuracy"], "did you mean 'val_accuracy'?"),
        (["loss", "accuracy"], "pass validation_data=, or did you mean 'accuracy'?"),
        (["loss"], "pass validation_data=, or name one of these."),
        (["val_loss"], "name one of these, or add it to metrics=."),
    ],
)
def test_a_metric_that_is_nearly_known_is_told_which(known: list[str], remedy: str):
    results = Results([Result("a", Outcome.COMPLETED, history={name: [0.5] for name in known})])
    with pytest.raises(OptionError) as caught:
        results.best("val_acc")
    assert str(caught.value).endswith(f"Received: 'val_acc'. Remedy: {remedy}")


def test_without_a_sound_job_there_is_no_best():
    with pytest.raises(OptionError, match=r"a job with a finite loss\. Received: none"):
        Results([result("a", math.nan), result("b", 0.1, Outcome.FAILED)]).best("loss")


# As text


def test_the_table_is_aligned():
    results = Results([result("long-name", 0.123456), result("b", outcome=Outcome.INTERRUPTED, steps=1000)])
    assert results.table() == "\n".join(
        [
            "name       outcome      steps  epoch  loss",
            "long-name  completed    10            0.1235",
            "b          interrupted  1000",
        ]
    )


def test_the_table_sorts_best_first_and_unsound_last():
    results = Results([result("x", 0.0, Outcome.DIVERGED), *three()])
    assert [line.split()[0] for line in results.table(sort="loss").splitlines()[1:]] == ["b", "a", "c", "x"]
    assert [row["name"] for row in results.rows(sort="loss", top=2)] == ["b", "a"]
    assert len(results.table(top=1).splitlines()) == 2


def test_the_table_cannot_sort_by_what_is_not_there():
    with pytest.raises(OptionError, match="Received: 'acc'"):
        three().table(sort="acc")


def test_the_table_sorts_also_when_no_job_is_sound():
    assert len(Results([result("a", 0.1, Outcome.DIVERGED)]).table(sort="loss").splitlines()) == 2


def test_no_results_are_a_head_only():
    assert Results([]).table() == "name  outcome  steps  epoch"


def test_the_repr_counts_outcomes():
    results = Results([*three(), result("x", outcome=Outcome.FAILED)], seconds=12.34)
    assert repr(results) == "Results(4 jobs: 3 completed, 1 failed; 12.3 s)"


# As a frame


def test_the_frame_has_a_row_a_job_with_its_config():
    frame = Results(
        [result("a", 0.5, config={"lr": 0.1}, seconds=1.5, strategy="fused"), result("b")]
    ).frame()
    assert list(frame.index) == ["a", "b"]
    assert frame.loc["a"].to_dict() == {
        "lr": 0.1,
        "outcome": "completed",
        "steps": 10,
        "epoch": None,
        "loss": 0.5,
        "seconds": 1.5,
        "strategy": "fused",
    }
    assert math.isnan(frame.loc["b", "loss"])


def test_a_frame_of_nothing_is_empty():
    assert len(three().failed.frame()) == 0


# As a page


def test_the_page_escapes_what_users_wrote():
    nasty = result("<script>alert(1)</script>", history={"<b>loss</b>": [0.5]})
    page = Results([nasty])._repr_html_()
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<td>0.5</td>" in page


def test_the_page_shows_a_hundred_and_counts_the_rest():
    page = Results([result(str(i), 0.5) for i in range(130)])._repr_html_()
    assert page.count("<tr>") == 101
    assert "<p>and 30 more</p>" in page
    assert "more</p>" not in three()._repr_html_()


NASTY = "[red]\x1b[31mx\x07\n\u202e[/red]"
SHOWN = r"[red]\x1b[31mx\x07\n\u202e[/red]"


def test_names_are_shown_without_what_a_terminal_takes_for_orders():
    results = Results([result(NASTY, history={f"m{NASTY}": [0.5]})])
    for text in (results.table(), results._repr_html_()):
        assert SHOWN in text
        assert f"m{SHOWN}" in text
        assert "\x1b" not in text
    assert len(results.table().splitlines()) == 2
    for ask in (results.best, lambda name: results[name]):
        with pytest.raises((OptionError, KeyError)) as caught:
            ask("z")
        assert "\x1b" not in str(caught.value)
