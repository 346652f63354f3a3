"""A job is frozen and checked when it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

import carpool
from carpool.errors import DataError, JobError, LossError, NameTakenError, OptionError
from carpool.job import named

DATA = ([1.0], [2.0])


def job(**options: Any) -> carpool.Job:
    return carpool.Job(dict, DATA, **{"loss": max, **options})


def test_the_defaults():
    made = job()
    assert (made.name, made.batch_size, made.epochs, made.seed, made.shuffle) == (None, 32, 1, 0, True)
    assert (made.stop, made.clip_norm, tuple(made.callbacks)) == (None, None, ())


def test_a_job_is_frozen():
    with pytest.raises(FrozenInstanceError):
        job().epochs = 3  # type: ignore[misc]


def test_a_job_is_itself_and_no_other():
    """Adapters keep what they built by job: two that are written alike are still two."""
    one, other = job(name="a"), job(name="a")
    assert one != other
    assert len({one, other}) == 2


def test_a_copy_with_changes_is_checked_again():
    assert replace(job(epochs=3), batch_size=8).epochs == 3
    with pytest.raises(JobError, match="epochs of at least 1"):
        replace(job(), epochs=0)


@pytest.mark.parametrize("field", ["batch_size", "epochs"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True, "8", None])
def test_sizes_are_whole_numbers_of_at_least_one(field: str, value: Any):
    with pytest.raises(JobError, match=f"Expected {field} of at least 1. Received: {value!r}. Remedy: "):
        job(**{field: value})


@pytest.mark.parametrize("field", ["batch_size", "epochs", "seed"])
def test_numbers_may_be_numpys_and_become_plain(field: str):
    value = getattr(job(**{field: np.int64(7)}), field)
    assert value == 7
    assert type(value) is int


@pytest.mark.parametrize("seed", [1.5, None, "7"])
def test_a_seed_is_a_whole_number(seed: Any):
    with pytest.raises(JobError, match=f"Expected seed that is a whole number. Received: {seed!r}. Remedy: "):
        job(seed=seed)


def test_a_seed_may_be_negative_or_huge():
    assert [job(seed=seed).seed for seed in (-1, 2**70)] == [-1, 2**70]


@pytest.mark.parametrize("name", ["", "  ", "\t"])
def test_a_name_is_not_empty(name: str):
    with pytest.raises(NameTakenError, match="Expected a name"):
        job(name=name)


def test_a_name_is_text():
    with pytest.raises(NameTakenError, match="Expected a name"):
        job(name=3)


def test_data_is_needed():
    with pytest.raises(DataError, match=r"Job 'a': Expected data\. Received: None"):
        carpool.Job(dict, None, loss=max, name="a")


def test_a_job_has_one_objective():
    with pytest.raises(LossError, match="either loss= or step="):
        job(step=lambda model, batch: 0)


@pytest.mark.parametrize("options", [{"loss": 3}, {"loss": None, "step": "mse"}, {"metrics": {"acc": 1}}])
def test_an_objective_is_a_function(options: dict[str, Any]):
    with pytest.raises(LossError, match="to be a function"):
        job(**options)


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_norm_to_clip_to_is_positive(norm: float):
    with pytest.raises(JobError, match="clip_norm above 0"):
        job(clip_norm=norm)


def test_a_norm_to_clip_to_may_be_infinite():
    assert job(clip_norm=float("inf")).clip_norm == float("inf")


# What it stops on


@pytest.mark.parametrize("metric", ["loss", "val_loss", "acc", "val_acc"])
def test_it_may_watch_what_it_measures(metric: str):
    made = job(metrics={"acc": max}, validation_data=DATA, stop=carpool.EarlyStopping(metric))
    assert made.stop is not None


def test_it_may_not_watch_what_it_does_not_measure():
    with pytest.raises(OptionError, match=r"one of acc, loss .*Received: 'f1'"):
        job(metrics={"acc": max}, stop=carpool.EarlyStopping("f1"))


def test_watching_validation_needs_validation_data():
    with pytest.raises(OptionError, match="validation_data to watch 'val_loss'"):
        job(stop=carpool.EarlyStopping("val_loss"))


def test_a_step_may_return_any_metric():
    stop = carpool.EarlyStopping("f1")
    assert job(loss=None, step=lambda model, batch: {}, stop=stop).stop is stop


def test_stop_is_a_policy():
    with pytest.raises(OptionError, match=r"stop=EarlyStopping\(\.\.\.\)"):
        job(stop=3)


# Schedules


@pytest.mark.parametrize("every", ["auto", "step", "epoch"])
def test_a_schedule_says_when_it_steps(every: str):
    assert carpool.Schedule(print, every=every).every == every


def test_a_schedule_steps_at_no_other_time():
    with pytest.raises(OptionError, match="Received: 'batch'"):
        carpool.Schedule(print, every="batch")


# Names


def test_jobs_without_a_name_are_numbered_by_position():
    assert [made.name for made in named([job(), job(name="a"), job()])] == ["job-0", "a", "job-2"]


def test_a_name_that_would_be_given_may_be_taken():
    with pytest.raises(NameTakenError, match="'job-1' at positions 0 and 1"):
        named([job(name="job-1"), job()])


def test_two_jobs_may_not_share_a_name():
    with pytest.raises(NameTakenError, match="'a' at positions 0 and 2"):
        named([job(name="a"), job(name="b"), job(name="a")])


@pytest.mark.parametrize("jobs", [list, lambda: iter(())])
def test_there_is_at_least_one_job(jobs: Callable[[], Any]):
    with pytest.raises(JobError, match="at least one job"):
        named(jobs())


def test_jobs_are_jobs():
    with pytest.raises(JobError, match="dict at position 1"):
        named([job(), {}])  # type: ignore[list-item]


def test_jobs_may_come_from_a_generator():
    assert len(named(job() for _ in range(3))) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 0}, "a share above 0 and up to 1"),
        ({"share": 1.5}, "a share above 0 and up to 1"),
        ({"timeout_s": 0}, "a timeout_s above 0"),
        ({"timeout_s": -1.0}, "a timeout_s above 0"),
    ],
)
def test_what_only_a_process_can_keep_is_checked(options: dict[str, float], words: str):
    with pytest.raises(JobError, match=words):
        job(**options)
    assert job(share=1, timeout_s=0.5).share == 1
