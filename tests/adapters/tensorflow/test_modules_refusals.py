"""What is refused, and what is repaired: models, optimizers and functions that two jobs share, and jobs that say too little."""

from __future__ import annotations

from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from modules_zoo import Dense, data, loss
from test_modules_train import PLAIN, assert_same, job, mlp

import carpool
from carpool.errors import DataError, DeviceError, JobError, LossError, ModelError, OptimizerError

x, y = data(double=False)


@tf.function
def train_step(model: Any, batch: Any, optimizer: Any) -> Any:
    """One function for all models, as people write it: by itself it raises at the second optimizer."""
    with tf.GradientTape() as tape:
        value = loss(model(batch[0]), batch[1])
    slopes = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(slopes, model.trainable_variables, strict=True))
    return value


PLAIN_STEP = cast(Any, train_step).python_function


def own(optimizer: Any) -> Any:
    return lambda model, batch: train_step(model, batch, optimizer)


def test_a_function_that_two_jobs_share_is_traced_for_each():
    shared = [
        job(loss=None, step=own(keras.optimizers.Adam(rate)), optimizer=None, name=f"{rate}")
        for rate in (0.01, 0.02)
    ]
    results = carpool.train(shared, **PLAIN)
    for result, rate in zip(results, (0.01, 0.02), strict=True):
        assert result.outcome is carpool.Outcome.COMPLETED, result.error
        [plain] = carpool.train([job(optimizer=keras.optimizers.Adam(rate))], **PLAIN)
        assert_same(result.model, plain.model)


def test_by_itself_such_a_function_raises():
    """What the repair is for: if TensorFlow ever takes this, carpool need not care."""
    step: Any = tf.function(PLAIN_STEP)
    batch = tf.constant(x[:16]), tf.constant(y[:16])
    step(mlp(), batch, keras.optimizers.Adam(0.01))
    with pytest.raises(ValueError, match="singleton"):
        step(mlp(), batch, keras.optimizers.Adam(0.01))


def test_a_loss_as_a_shared_function():
    shared = tf.function(lambda model, batch: loss(model(batch[0]), batch[1]))
    jobs = [job(loss=None, step=shared, name=name) for name in "ab"]
    for result in carpool.train(jobs, **PLAIN):
        assert_same(result.model, carpool.train([job()], **PLAIN)[0].model)


def test_one_that_cannot_be_reached_is_told():
    hidden = {"step": tf.function(PLAIN_STEP)}

    def step_of(optimizer: Any) -> Any:
        return lambda model, batch: hidden["step"](model, batch, optimizer)

    jobs = [job(loss=None, step=step_of(keras.optimizers.Adam(0.01)), optimizer=None, name=n) for n in "ab"]
    with pytest.raises(LossError, match=r"(?s)creates no variables.*optimizer\.build"):
        carpool.train(jobs, **PLAIN)


def test_a_model_in_two_jobs():
    model = mlp()
    with pytest.raises(ModelError, match=r"(?s)'b'.*model of its own.*in job 'a' too.*deepcopy"):
        carpool.train([job(model=model), job(model=model, name="b")], **PLAIN)

    class Around(tf.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def __call__(self, x: Any) -> Any:
            return self.inner(x)

    with pytest.raises(ModelError, match="some of its variables"):
        carpool.train([job(model=model), job(model=Around(model), name="b")], **PLAIN)


def test_an_optimizer_in_two_jobs():
    optimizer = keras.optimizers.Adam(0.01)
    with pytest.raises(OptimizerError, match="of its own for each job"):
        carpool.train([job(optimizer=optimizer), job(optimizer=optimizer, name="b")], **PLAIN)


class Empty(tf.Module):
    def __call__(self, x: Any) -> Any:
        return x


class Silent(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = Dense(6, 3, 0, 0, tf.float32)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model": Empty()}, ModelError, "trainable variables"),
        ({"model": Silent()}, LossError, "can be called"),
        ({"model": lambda: 3}, ModelError, "a factory of a tf.Module"),
        ({"optimizer": None}, OptimizerError, "an optimizer beside loss="),
        ({"optimizer": 3}, OptimizerError, "a function that makes one"),
        ({"optimizer": lambda: 3}, OptimizerError, "a factory of"),
        ({"loss": None}, LossError, "loss= or step="),
        ({"loss": lambda p, t: p}, LossError, "to be a scalar"),
        ({"loss": None, "step": lambda m, b: {"other": 1.0}}, LossError, 'dict with "loss"'),
        ({"loss": None, "step": lambda m, b: {"loss": "no"}}, LossError, "scalar|number"),
        ({"loss": None, "step": lambda m, b: loss(m(b[0]), b[1]), "optimizer": None}, OptimizerError, "changes no trainable"),
        ({"data": (x, y[:3])}, DataError, "one length"),
        ({"data": x}, DataError, r"\(x, y\) beside loss"),
        ({"index": [99]}, DataError, "index within"),
        ({"accumulate": 2}, JobError, "gradient_accumulation_steps"),
        ({"scheduler": print}, JobError, "schedules"),
        ({"precision": "bf16"}, JobError, "cast in the model"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_taken(changes, error, says):
    with pytest.raises(error, match=says):
        carpool.train([job(**changes)], **PLAIN)


def test_a_device_that_is_not_there():
    with pytest.raises(DeviceError, match="cuda:7"):
        carpool.train([job()], device="cuda:7", reporters=[])


def test_a_step_that_raises_fails_alone():
    def raises(model: Any, batch: Any) -> Any:
        tf.debugging.assert_less(tf.reduce_max(batch[0]), -1e9)
        return loss(model(batch[0]), batch[1])

    results = carpool.train([job(loss=None, step=raises, name="bad"), job(name="good")], **PLAIN)
    assert results["bad"].outcome is carpool.Outcome.FAILED
    assert results["good"].outcome is carpool.Outcome.COMPLETED
    assert np.isfinite(results["good"].history["loss"]).all()
