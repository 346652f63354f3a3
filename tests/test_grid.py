"""Every combination of the axes, built when it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import carpool
from carpool.errors import JobError


def make(**config: Any) -> carpool.Job:
    return carpool.Job(dict, ([1.0], [2.0]), loss=max)


def test_every_combination_comes_once_the_last_axis_fastest():
    jobs = carpool.grid(make, a=[1, 2], b=list("xyz"))
    assert len(jobs) == 6
    assert [tuple(job.config.values()) for job in jobs if job.config] == [
        (1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z"),
    ]  # fmt: skip


def test_names_say_the_combination():
    names = [job.name for job in carpool.grid(make, lr=[0.1, 1e-5, 3.0], act=[max], deep=[True])]
    assert names == ["lr=0.1,act=max,deep=True", "lr=1e-05,act=max,deep=True", "lr=3,act=max,deep=True"]


def test_a_name_the_function_gave_stays():
    jobs = carpool.grid(lambda i: carpool.Job(dict, ([1.0], [2.0]), loss=max, name=f"mine-{i}"), i=[0, 1])
    assert [job.name for job in jobs] == ["mine-0", "mine-1"]


def test_a_config_the_function_gave_is_kept_beside_the_combination():
    jobs = carpool.grid(
        lambda lr: carpool.Job(dict, ([1.0], [2.0]), loss=max, config={"net": "mlp", "lr": "?"}), lr=[0.5]
    )
    assert jobs[0].config == {"net": "mlp", "lr": 0.5}


def test_nothing_is_built_before_it_is_read():
    built: list[int] = []

    def slow(i: int) -> carpool.Job:
        built.append(i)
        return make()

    jobs = carpool.grid(slow, i=range(1000))
    assert len(jobs) == 1000
    assert built == []
    assert jobs[998].config == {"i": 998}
    assert built == [998]


def test_it_is_a_sequence():
    jobs = carpool.grid(make, i=range(5))
    assert jobs[-1].name == "i=4"
    assert [job.name for job in jobs[1:4:2]] == ["i=1", "i=3"]
    assert [job.name for job in reversed(jobs)] == [f"i={i}" for i in (4, 3, 2, 1, 0)]
    with pytest.raises(IndexError):
        jobs[5]


def test_axes_may_be_iterators_and_arrays():
    assert len(carpool.grid(make, a=iter([1, 2]), b=np.linspace(0, 1, 3))) == 6


def test_without_axes_there_is_one_job():
    jobs = carpool.grid(make)
    assert len(jobs) == 1
    assert (jobs[0].name, jobs[0].config) == (None, {})


def test_an_axis_has_values():
    with pytest.raises(JobError, match=r"Expected values for axis 'lr'\. Received: none"):
        carpool.grid(make, lr=[], seed=[1])


def test_the_function_returns_a_job():
    with pytest.raises(JobError, match=r"to return a carpool\.Job\. Received: None"):
        carpool.grid(lambda lr: None, lr=[1])[0]  # type: ignore[arg-type,return-value]
