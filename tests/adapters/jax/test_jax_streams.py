"""JAX jobs on data that comes in batches: each ends where the same batches as arrays would have led it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest
from jax_zoo import data, loss, mlp, what_is_left

import carpool
from carpool.errors import DataError
from carpool.job import Job
from carpool.result import Outcome, Result, Results
from carpool.testing.conformance import assert_close

SIZE = 16


class Batches:
    """Pairs of arrays, in the order of the data, the last one short; counts its passes."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.passes, self._fails_at = 0, fails_at

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        x, y = data(False)
        for number, start in enumerate(range(0, len(x), SIZE)):
            if number == self._fails_at:
                raise OSError("the disk is gone")
            yield x[start : start + SIZE], y[start : start + SIZE]


class Samples:
    """A dataset by number."""

    def __len__(self) -> int:
        return len(data(False)[0])

    def __getitem__(self, place: int) -> Any:
        x, y = data(False)
        return x[place], y[place]


def job(source: Any, rate: float = 0.01, **options: Any) -> Job:
    settings = {"epochs": 3, "batch_size": SIZE, "shuffle": False, "name": str(rate), **options}
    return Job(mlp, source, loss=loss, optimizer=optax.adam(rate), **settings)


def run(jobs: list[Job], **options: Any) -> Results:
    return carpool.train(jobs, device="cpu", reporters=[], **options)


def as_arrays(rate: float = 0.01, **options: Any) -> Result:
    return run([job(data(False), rate, **options)])[0]


def assert_same(results: Results, **options: Any) -> None:
    for result in results:
        assert_close(
            what_is_left(result), what_is_left(as_arrays(float(result.name), **options)), double=False
        )


def test_an_iterable_that_jobs_share_is_read_once_for_all_of_them():
    source = Batches()
    results = run([job(source, rate) for rate in (0.01, 0.02, 0.03)])
    assert {result.strategy for result in results} == {"fused"}
    assert source.passes == 3
    assert_same(results)


def test_streams_of_their_own_are_interleaved():
    results = run([job(Batches(), rate) for rate in (0.01, 0.02)])
    assert {result.strategy for result in results} == {"interleaved"}
    assert "streams of their own" in results[0].reason
    assert_same(results)


def test_verify_takes_no_batch():
    source = Batches()
    assert_same(run([job(source, rate) for rate in (0.01, 0.02)], verify=True))


def test_a_dataset_by_number_is_shuffled_by_the_jobs_seed():
    (result,) = run([job(Samples(), shuffle=True, seed=5)])
    assert_same(Results([result], 0.0), shuffle=True, seed=5)


@pytest.mark.parametrize("kind", ["function", "queue", "loader"])
def test_other_sources(kind):
    if kind == "function":
        source: Any = lambda: Batches()  # noqa: E731
    elif kind == "queue":
        source = carpool.data.Queue(lambda worker: iter(Batches()), capacity=2)
    else:
        from torch.utils.data import DataLoader

        source = DataLoader(Samples(), batch_size=SIZE)  # type: ignore[arg-type]
    assert_same(run([job(source)]))


def test_validation_that_comes_in_batches():
    x, y = data(False)
    (result,) = run([job(data(False), validation_data=Batches())])
    assert result.history["val_loss"][-1] == pytest.approx(float(loss(result.model(x), y)), rel=1e-5)


def test_a_source_that_raises_fails_its_job_with_what_it_did_before():
    results = run([job(Batches(fails_at=2)), job(Batches(), 0.02)])
    assert [result.outcome for result in results] == [Outcome.FAILED, Outcome.COMPLETED]
    assert isinstance(results[0].error, OSError)


def test_batches_without_samples_are_refused():
    with pytest.raises(DataError, match="batches of arrays with one first dimension"):
        run([job(iter([(np.float32(1), np.float32(2))]))])
