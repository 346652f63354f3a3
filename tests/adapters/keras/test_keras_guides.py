"""What Keras' own guides and examples do, beyond arrays and a model of Keras' own: steps of their own, models that are never called."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import carpool

X = np.random.default_rng(0).normal(size=(26, 5)).astype("float32")
QUIET: dict[str, Any] = {"verbose": 0}
OPTIONS: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False}


class Reconstructing(keras.Sequential):
    """Its step is given x, not a tuple, and x is the target too."""

    def train_step(self, *held: Any) -> Any:
        *state, x = held
        if isinstance(x, tuple):
            raise TypeError("x came in a tuple")
        return super().train_step(*state, x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred - x))


def reconstructing(**compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = Reconstructing([keras.Input((5,)), layers.Dense(3, activation="relu"), layers.Dense(5)])
    model.compile("sgd", **compiled)
    return model


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["programs", "its own fit"])
def test_a_step_of_x_alone_is_given_x_alone(run_eagerly: bool) -> None:
    alone = reconstructing(run_eagerly=run_eagerly).fit(X, **QUIET, **OPTIONS)
    result = carpool.fit([reconstructing(run_eagerly=run_eagerly)], X, reporters=[], **OPTIONS)[0]
    np.testing.assert_allclose(result.history["loss"], alone.history["loss"], rtol=1e-5)


class Uncalled(keras.Model):
    """Has parts and a step, and no `call`: Keras builds it on TensorFlow while it traces the step."""

    def __init__(self) -> None:
        super().__init__()
        self.part = keras.Sequential([keras.Input((5,)), layers.Dense(5)])

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss: Any = keras.ops.mean(keras.ops.square(self.part(data) - data))
        weights = self.part.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def uncalled() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = Uncalled()
    model.compile("sgd")
    return model


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="other backends refuse it in fit too")
def test_a_model_that_is_never_called_trains_by_its_own_fit() -> None:
    alone = uncalled().fit(X, **QUIET, **OPTIONS)
    job = carpool.Job(uncalled(), (X,), name="a", **OPTIONS)
    assert "Keras cannot build it before its first step" in carpool.plan([job]).explain()
    result = carpool.train([job], reporters=[])[0]
    np.testing.assert_allclose(result.history["loss"], alone.history["loss"], rtol=1e-5)


class Watching(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append("test batch")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append("epoch")


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="its train_step trains by its own fit there")
def test_a_callback_of_validation_batches_costs_nothing_where_there_is_no_validation() -> None:
    watching: Any = Watching()
    job = carpool.Job(reconstructing(), (X,), name="a", callbacks=[watching], **OPTIONS)
    assert "own fit" not in carpool.plan([job]).explain()
    carpool.train([job], reporters=[])
    assert watching.seen == ["epoch", "epoch"]


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="XLA on a CPU, as JAX uses it")
def test_convolutions_on_a_cpu_are_not_run_inside_a_loop() -> None:
    from carpool.adapters.keras.jax_engine import JaxEngine

    def convolving() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((5, 1)), layers.Conv1D(3, 2), layers.Flatten(), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    data = {"x": X[:, :, None], "y": X.sum(1), "validation_split": 0.5, **OPTIONS}
    alone = convolving().fit(**QUIET, **data)
    result = carpool.fit([convolving()], reporters=[], **data)[0]
    for name, values in alone.history.items():
        np.testing.assert_allclose(result.history[name], values, rtol=1e-5)
    assert not JaxEngine([convolving()], "cpu", (), [0]).takes_epochs
    assert JaxEngine([reconstructing()], "cpu", (), [0]).takes_epochs
