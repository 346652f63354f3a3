"""Early stopping as a pure value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from carpool import EarlyStopping
from carpool.errors import OptionError
from carpool.stopping import Patience, declared, direction


def after(values: Sequence[float], metric: str = "val_loss", **policy: Any) -> list[Patience]:
    """The states after each of the values."""
    state, states = Patience(EarlyStopping(metric, **policy)), []
    for epoch, value in enumerate(values):
        state = state.after(epoch, {metric: value})
        states.append(state)
    return states


# Which way is better


HIGHER = "accuracy val_accuracy acc val_balanced_acc auc val_f1 R2 mean_iou recall val_dice psnr mcc reward ndcg acc_5"
LOWER = "loss val_loss mse error perplexity top5_error score_loss accuracy_loss valLoss MeanSquaredError brier_score"
UNKNOWN = (
    "map elbo val_map mAP top_5 score contrast laughter distance neg_mse loss_reduction time log_likelihood"
)


@pytest.mark.parametrize("metric", HIGHER.split())
def test_these_are_better_when_larger(metric: str):
    assert direction(metric) == "max"


@pytest.mark.parametrize("metric", LOWER.split())
def test_these_are_better_when_smaller(metric: str):
    """A word such as loss or error wins over one such as accuracy."""
    assert direction(metric) == "min"


@pytest.mark.parametrize("metric", UNKNOWN.split())
def test_a_metric_of_unknown_direction_needs_a_mode(metric: str):
    """It is refused before anything runs, by its name, with the two modes."""
    with pytest.raises(OptionError, match=f'\'{metric}\'.*mode="min".*mode="max"'):
        EarlyStopping(metric)
    assert [EarlyStopping(metric, mode=mode).mode for mode in ("min", "max")] == ["min", "max"]


def test_modes_that_are_said_are_known_of_our_policies_and_of_those_like_them():
    class Theirs:  # Keras' callbacks have these two words
        monitor, mode = "elbo", "max"

    class Unsure:
        monitor, mode = "reward", "auto"

    said = declared(
        [EarlyStopping("map", mode="max"), EarlyStopping("loss"), None, print, Theirs(), Unsure()]
    )
    assert said == {"map": "max", "elbo": "max"}
    assert declared([EarlyStopping("map", mode="max"), EarlyStopping("map", mode="min")]) == {}


def test_what_is_said_wins_over_the_name():
    assert direction("accuracy", "min") == "min"
    assert direction("loss", "max") == "max"


def test_an_unknown_mode_is_refused():
    with pytest.raises(OptionError, match="Received: 'up'"):
        EarlyStopping("loss", mode="up")


def test_patience_is_not_negative():
    with pytest.raises(OptionError, match="patience of at least 0"):
        EarlyStopping("loss", patience=-1)


# Patience


def test_the_first_value_is_an_improvement():
    (state,) = after([5.0])
    assert (state.best, state.best_epoch, state.improved, state.exhausted) == (5.0, 0, True, False)


def test_an_equal_value_is_none():
    assert [state.improved for state in after([5.0, 5.0, 4.0, 4.0])] == [True, False, True, False]


@pytest.mark.parametrize(("patience", "stops_after"), [(0, 2), (1, 2), (2, 3), (3, 4)])
def test_it_is_exhausted_after_so_many_epochs_without_improvement(patience: int, stops_after: int):
    states = after([1.0] * 6, patience=patience)
    assert [state.exhausted for state in states].index(True) == stops_after - 1


def test_an_improvement_forgets_the_waiting():
    assert [state.waited for state in after([3.0, 4.0, 4.0, 2.0, 3.0], patience=9)] == [0, 1, 2, 0, 1]


def test_min_delta_must_be_exceeded():
    assert [s.improved for s in after([1.0, 0.9, 0.74, 0.5], min_delta=0.25)] == [True, False, True, False]
    up = after([0.5, 0.7, 0.76], metric="accuracy", min_delta=0.25)
    assert [state.improved for state in up] == [True, False, True]


def test_larger_is_better_for_an_accuracy():
    states = after([0.5, 0.6, 0.4], metric="accuracy")
    assert (states[-1].best, states[-1].best_epoch, states[-1].improved) == (0.6, 1, False)


def test_nan_is_never_an_improvement():
    states = after([math.nan, 2.0, math.nan], patience=5)
    assert [state.improved for state in states] == [False, True, False]
    assert (states[0].best, states[0].best_epoch) == (None, -1)
    assert states[-1].best == 2.0


def test_the_state_before_stays_as_it_was():
    before = Patience(EarlyStopping("loss"))
    before.after(0, {"loss": 1.0})
    assert before == Patience(EarlyStopping("loss"))


def test_a_metric_that_is_not_there_is_named_beside_those_that_are():
    with pytest.raises(OptionError, match=r"watch one of acc, loss\. Received: 'val_loss'\. Remedy: "):
        Patience(EarlyStopping()).after(0, {"loss": 1.0, "acc": 0.5})
