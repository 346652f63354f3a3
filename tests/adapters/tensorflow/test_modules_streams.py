"""Data that comes in batches: datasets read inside the loop, generators and loaders."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from modules_zoo import data
from test_modules_train import PLAIN, assert_same, job

import carpool
from carpool.errors import DataError

x, y = data(double=False)


def dataset(size: int = 16) -> Any:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def generated() -> Any:
    for start in range(0, len(x), 16):
        yield x[start : start + 16], y[start : start + 16]


class Samples:
    def __len__(self) -> int:
        return len(x)

    def __getitem__(self, place: int) -> Any:
        return x[place], y[place]


STREAMS = {
    "a dataset": dataset,
    "a dataset that only ends": lambda: dataset().filter(lambda a, b: True),
    "a prefetching one": lambda: dataset().prefetch(tf.data.AUTOTUNE),
    "batches of Python's": lambda: generated,
    "a queue": lambda: carpool.data.Queue(lambda worker: generated()),
    "samples": Samples,
}


@cache
def in_order() -> Any:
    """The same data as arrays, in their own order."""
    return carpool.train([job(shuffle=False, validation_data=(x, y))], **PLAIN)[0]


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_ends_where_arrays_end(kind):
    [ours] = carpool.train([job(data=STREAMS[kind](), shuffle=False, validation_data=(x, y))], **PLAIN)
    arrays = in_order()
    assert ours.outcome is carpool.Outcome.COMPLETED, ours.error
    assert ours.steps == arrays.steps == 12
    assert_same(ours.model, arrays.model)
    np.testing.assert_allclose(ours.history["loss"], arrays.history["loss"], rtol=1e-12)
    np.testing.assert_allclose(ours.history["val_loss"], arrays.history["val_loss"], rtol=1e-12)


def test_a_shuffling_dataset_is_shuffled_anew_each_epoch():
    seen: list[Any] = []

    def looked(a: Any, b: Any) -> Any:
        tf.py_function(lambda value: seen.append(float(value)), [a[0, 0]], [])
        return a, b

    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(60, seed=1).batch(60).map(looked)
    carpool.train([job(data=shuffled)], **PLAIN)
    assert len(set(seen[:3])) == 3


def test_many_launches_make_an_epoch(monkeypatch):
    from carpool.adapters.tensorflow import stream_session

    monkeypatch.setattr(stream_session, "MAX_CHUNK_STEPS", 3)
    whole = in_order()
    for kind in ("a dataset", "a dataset that only ends"):
        [cut] = carpool.train([job(data=STREAMS[kind](), shuffle=False)], **PLAIN)
        assert_same(cut.model, whole.model)
        assert len(cut.history["loss"]) == 3


def test_two_jobs_read_a_dataset_each_for_itself():
    shared = dataset()
    together = carpool.train([job(data=shared, name="a"), job(data=shared, name="b", seed=1)], **PLAIN)
    for result in together:
        [alone] = carpool.train([job(data=dataset(), seed=0 if result.name == "a" else 1)], **PLAIN)
        assert_same(result.model, alone.model)


def test_validation_comes_from_a_dataset_too():
    [ours] = carpool.train([job(validation_data=dataset(7))], **PLAIN)
    [arrays] = carpool.train([job(validation_data=(x, y))], **PLAIN)
    assert ours.history["val_loss"] == arrays.history["val_loss"]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: dataset().repeat(), "that ends.*take"),
        (lambda: tf.data.Dataset.range(8), "beside loss="),
        (lambda: tf.data.Dataset.from_tensors((1.0, 2.0)), "dataset.batch"),
        (lambda: dataset().take(0), "at least one batch"),
    ],
)
def test_what_no_epoch_can_be_made_of(made, says):
    with pytest.raises(DataError, match=f"(?s){says}"):
        carpool.train([job(data=made())], **PLAIN)


def test_what_the_input_raises_is_the_jobs_failure():
    def broken() -> Any:
        yield x[:16], y[:16]
        raise OSError("the disk is gone")

    results = carpool.train([job(data=broken, name="broken"), job(name="sound")], **PLAIN)
    assert results["broken"].outcome is carpool.Outcome.FAILED
    assert "the disk is gone" in str(results["broken"].error)
    assert results["sound"].outcome is carpool.Outcome.COMPLETED

    def fails(a: Any, b: Any) -> Any:
        tf.debugging.assert_less(tf.abs(a), 2.0)
        return a, b

    results = carpool.train([job(data=dataset().map(fails), name="broken"), job(name="sound")], **PLAIN)
    assert results["broken"].outcome is carpool.Outcome.FAILED
    assert results["sound"].outcome is carpool.Outcome.COMPLETED
