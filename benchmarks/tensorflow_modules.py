"""Three different TensorFlow modules with three datasets: a loop over batches on the host, as people write it, beside `carpool.train`.

The host's loop calls a `tf.function` of one step for each batch of a `tf.data.Dataset` with prefetch, model after model. carpool is
given the same datasets, or the arrays. A whole call of carpool's traces its functions anew; `traced` is what that takes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import carpool

Say = Callable[[str], None]
SHAPES = {  # samples, inputs, hidden, classes, learning rate
    "a": (1000, 32, 64, 10, 1e-3),
    "b": (800, 64, 128, 5, 5e-4),
    "c": (1200, 16, 32, 2, 2e-3),
}
BATCH = 32


class Net(tf.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        _, inputs, hidden, classes, _ = SHAPES[name]
        self.w1 = tf.Variable(tf.random.stateless_normal((inputs, hidden), (0, 1)) * inputs**-0.5)
        self.w2 = tf.Variable(tf.random.stateless_normal((hidden, classes), (0, 2)) * hidden**-0.5)
        self.b1, self.b2 = tf.Variable(tf.zeros(hidden)), tf.Variable(tf.zeros(classes))

    def __call__(self, x: Any) -> Any:
        return tf.nn.relu(x @ self.w1 + self.b1) @ self.w2 + self.b2


def loss(prediction: Any, target: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=prediction))


def arrays(name: str) -> tuple[np.ndarray, np.ndarray]:
    samples, inputs, _, classes, _ = SHAPES[name]
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, inputs)).astype("float32")
    return x, random.integers(0, classes, samples).astype("int32")


def piped(name: str) -> Any:
    return tf.data.Dataset.from_tensor_slices(arrays(name)).batch(BATCH).prefetch(tf.data.AUTOTUNE)


def on_the_host(epochs: int) -> tuple[float, float]:
    """Seconds of the loop, and of the first call of each step, which traces it."""
    steps: dict[str, Any] = {}
    data = {name: piped(name) for name in SHAPES}
    began = time.perf_counter()
    for name, shape in SHAPES.items():
        steps[name] = _step(Net(name), keras.optimizers.Adam(shape[-1]))
        steps[name](*next(iter(data[name])))
    traced = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(epochs):
        for name, step in steps.items():
            for x, y in data[name]:
                step(x, y)
    return time.perf_counter() - began, traced


def _step(model: Any, optimizer: Any) -> Any:
    @tf.function(reduce_retracing=True)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(model(x), y)
        slopes = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(slopes, model.trainable_variables, strict=True))
        return value

    return step


def ours(epochs: int, data: Callable[[str], Any], compile: bool | str = "auto") -> tuple[float, float]:
    """Seconds of the whole call, and of one that trains for a single epoch: nearly all of that is tracing."""
    return _trained(epochs, data, compile), _trained(1, data, compile)


def _trained(epochs: int, data: Callable[[str], Any], compile: bool | str) -> float:
    jobs = [
        carpool.Job(
            Net(name), data(name), loss=loss, optimizer=keras.optimizers.Adam(shape[-1]), batch_size=BATCH,
            epochs=epochs, name=name,
        )
        for name, shape in SHAPES.items()
    ]  # fmt: skip
    began = time.perf_counter()
    results = carpool.train(jobs, device="cpu", reporters=[], compile=compile)
    seconds = time.perf_counter() - began
    assert all(result.outcome is carpool.Outcome.COMPLETED for result in results), results
    return seconds


def run(windows: int, quick: bool, say: Say) -> dict[str, Any]:
    epochs = 20 if quick else 200
    steps = epochs * sum(-(-shape[0] // BATCH) for shape in SHAPES.values())
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "host loop": lambda: on_the_host(epochs),
        "carpool": lambda: ours(epochs, arrays),
        "carpool, XLA": lambda: ours(epochs, arrays, compile=True),
        "carpool, tf.data": lambda: ours(epochs, piped),
    }
    on_the_host(1)  # the framework's own start-up is nobody's
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for window in range(windows):
        for way, measure in ways.items():
            taken[way].append(measure())
            say(f"window {window}: {way}: {taken[way][-1][0]:.2f} s, traced in {taken[way][-1][1]:.2f} s")
    whole = {way: statistics.median(one for one, _ in found) for way, found in taken.items()}
    traced = {way: statistics.median(one for _, one in found) for way, found in taken.items()}
    stepping = {way: whole[way] - (traced[way] if way != "host loop" else 0.0) for way in ways}
    found = {
        "epochs": epochs,
        "steps": steps,
        "seconds": {way: [round(one, 3) for one, _ in pairs] for way, pairs in taken.items()},
        "traced_s": {way: [round(one, 3) for _, one in pairs] for way, pairs in taken.items()},
        "steps_per_s": {way: round(steps / seconds) for way, seconds in whole.items()},
        "whole_call_ratio": {way: round(whole["host loop"] / seconds, 2) for way, seconds in whole.items()},
        "once_traced_ratio": {way: round(whole["host loop"] / s, 2) for way, s in stepping.items()},
    }
    say(f"three modules: {found}")
    return found
