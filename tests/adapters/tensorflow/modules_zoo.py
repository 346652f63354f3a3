"""The zoo of the conformance suite for TensorFlow modules: models, optimizers, schedules, and the plain loop they are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import carpool
from carpool.adapters.tensorflow.modules import variables
from carpool.job import Job
from carpool.result import Result
from carpool.tensorflow import step_seed
from carpool.testing import Reference, Variant

SAMPLES, BATCH = 60, 16
CROSS = tf.nn.sparse_softmax_cross_entropy_with_logits


def drawn(shape: tuple[int, ...], seed: int, place: int, kind: Any, scale: float = 0.4) -> tf.Variable:
    return tf.Variable(tf.cast(tf.random.stateless_normal(shape, (seed, place)) * scale, kind))


class Dense(tf.Module):
    def __init__(self, inputs: int, outputs: int, seed: int, place: int, kind: Any) -> None:
        super().__init__()
        self.w = drawn((inputs, outputs), seed, place, kind)
        self.b = tf.Variable(tf.zeros(outputs, kind))

    def __call__(self, x: Any) -> Any:
        return x @ self.w + self.b


class Mlp(tf.Module):
    def __init__(self, seed: int, kind: Any) -> None:
        super().__init__()
        self.layers = [Dense(6, 12, seed, 0, kind), Dense(12, 3, seed, 1, kind)]

    def __call__(self, x: Any) -> Any:
        return self.layers[1](tf.nn.relu(self.layers[0](x)))


class Convolution(tf.Module):
    def __init__(self, seed: int, kind: Any) -> None:
        super().__init__()
        self.kernel, self.out = drawn((3, 1, 4), seed, 0, kind), Dense(24, 3, seed, 1, kind)

    def __call__(self, x: Any) -> Any:
        found = tf.nn.conv1d(x[..., None], self.kernel, 1, "SAME")
        return self.out(tf.reshape(tf.nn.relu(found), (tf.shape(x)[0], 24)))


class Embedding(tf.Module):
    """Gradients of a few rows at a time."""

    def __init__(self, seed: int, kind: Any) -> None:
        super().__init__()
        self.table, self.out = drawn((7, 8), seed, 0, kind), Dense(8, 3, seed, 1, kind)

    def __call__(self, x: Any) -> Any:
        tokens = tf.cast(tf.abs(x[:, :5]) * 3, tf.int32) % 7
        return self.out(tf.tanh(tf.reduce_mean(tf.nn.embedding_lookup(self.table, tokens), 1)))


class Statistics(tf.Module):
    """Running statistics beside the weights, and a counter of whole numbers."""

    def __init__(self, seed: int, kind: Any) -> None:
        super().__init__()
        self.a, self.out = drawn((6, 12), seed, 0, kind), Dense(12, 3, seed, 1, kind)
        self.mean = tf.Variable(tf.zeros(12, kind), trainable=False)
        self.seen = tf.Variable(tf.constant(0), trainable=False)

    def __call__(self, x: Any, training: bool = False) -> Any:
        h = x @ self.a
        if not training:
            return self.out(tf.nn.relu(h - self.mean))
        mean = tf.reduce_mean(h, 0)
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.seen.assign_add(1)
        return self.out(tf.nn.relu(h - mean))


class Late(tf.Module):
    """Its variables are made in the first call."""

    def __init__(self, seed: int, kind: Any) -> None:
        super().__init__()
        self.seed, self.w = seed, None

    def __call__(self, x: Any) -> Any:
        if self.w is None:
            self.w = drawn((int(x.shape[-1]), 3), self.seed, 0, x.dtype)
        return x @ self.w


class Branching(tf.Module):
    """An `if` on a number that only the device knows, in TensorFlow's own words."""

    def __init__(self, seed: int, kind: Any) -> None:
        super().__init__()
        self.dense = Dense(6, 3, seed, 0, kind)

    def __call__(self, x: Any) -> Any:
        y = self.dense(x)
        return tf.cond(tf.reduce_mean(y) > 0, lambda: 2 * y, lambda: y)


class Dropout(tf.Module):
    def __init__(self, seed: int, kind: Any) -> None:
        super().__init__()
        self.layers = [Dense(6, 12, seed, 0, kind), Dense(12, 3, seed, 1, kind)]

    def __call__(self, x: Any, seed: Any, training: bool) -> Any:
        h = tf.nn.relu(self.layers[0](x))
        if training:
            h = tf.nn.experimental.stateless_dropout(h, 0.3, seed)
        return self.layers[1](h)


class Noisy(tf.Module):
    """It draws from a generator of its own, whose state is part of the job."""

    def __init__(self, seed: int, kind: Any) -> None:
        super().__init__()
        self.dense, self.draws = Dense(6, 3, seed, 0, kind), tf.random.Generator.from_seed(seed)

    def __call__(self, x: Any) -> Any:
        return self.dense(x + 0.1 * self.draws.normal((6,), dtype=x.dtype))


MODELS: Mapping[str, Callable[[int, Any], tf.Module]] = {
    "mlp": Mlp, "convolution": Convolution, "embedding": Embedding, "statistics": Statistics, "late": Late,
    "branching": Branching, "dropout": Dropout, "noisy": Noisy,
}  # fmt: skip
RANDOM = ("dropout", "noisy")
V1 = tf.compat.v1.train


class Signs:
    """An optimizer of the user's own, which makes its state in its first update."""

    def __init__(self, rate: float) -> None:
        self._rate, self._slots = rate, {}

    def apply_gradients(self, grads_and_vars: Any) -> None:
        for slope, variable in grads_and_vars:
            if variable.ref() not in self._slots:
                self._slots[variable.ref()] = tf.Variable(tf.zeros_like(variable), trainable=False)
            held = self._slots[variable.ref()]
            held.assign(0.9 * held + 0.1 * tf.convert_to_tensor(slope))
            variable.assign_sub(tf.cast(self._rate, variable.dtype) * tf.sign(held))

    @property
    def variables(self) -> list[Any]:
        return list(self._slots.values())


OPTIMIZERS: Mapping[str, tuple[float, Callable[[Any], Any]]] = {
    "sgd": (0.05, keras.optimizers.SGD),
    "momentum": (0.02, lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True)),
    "rmsprop": (0.005, lambda rate: keras.optimizers.RMSprop(rate, momentum=0.9)),
    "adamw": (0.01, lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1)),
    "adagrad": (0.05, keras.optimizers.Adagrad),
    "v1 momentum": (0.02, lambda rate: V1.MomentumOptimizer(rate, 0.9)),
    "v1 adam": (0.01, V1.AdamOptimizer),
    "own": (0.01, Signs),
    "adam": (0.01, keras.optimizers.Adam),
}
RATED = ("own", "v1 momentum", "v1 adam")
"""Those that take no schedule of Keras'."""
SCHEDULES: Mapping[str, Callable[[float], Any]] = {
    "none": lambda rate: rate,
    "cosine": lambda rate: keras.optimizers.schedules.CosineDecay(rate, 40),
    "exponential": lambda rate: keras.optimizers.schedules.ExponentialDecay(rate, 10, 0.8),
}


@cache
def data(double: bool) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, 6)).astype(np.float64 if double else np.float32)
    return x, random.integers(0, 3, SAMPLES).astype(np.int32)


def loss(prediction: Any, target: Any) -> Any:
    return tf.reduce_mean(CROSS(labels=target, logits=prediction))


def make_job(model: str, optimizer: str, scheduler: str, variant: Variant, double: bool) -> Job:
    rate, rule = OPTIMIZERS[optimizer]
    schedule = SCHEDULES["none" if optimizer in RATED else scheduler](rate * variant.scale)
    kind = tf.float64 if double else tf.float32
    options = {"batch_size": BATCH, "epochs": variant.epochs, **variant.options}
    return Job(
        lambda seed: MODELS[model](seed, kind),
        data(double),
        loss=loss,
        optimizer=lambda: rule(schedule),
        seed=variant.seed,
        name=f"{model}-{variant.seed}",
        **options,
    )


def plain_loop(job: Job, passes: int = 1) -> Reference:
    """The job by hand: a function of one step, called for each batch of `carpool.batch_order`."""
    x, y = job.data
    model, rule, history = job.model(job.seed), job.optimizer(), []
    words = type(model).__call__.__code__.co_varnames
    if getattr(model, "w", 0) is None:
        model(x[:1])

    @tf.function
    def step(x: Any, y: Any, seed: Any) -> Any:
        given = ({"seed": seed} if "seed" in words else {}) | (
            {"training": True} if "training" in words else {}
        )
        with tf.GradientTape() as tape:
            value = loss(model(x, **given), y)
        slopes = tape.gradient(value, model.trainable_variables)
        if job.clip_norm is not None:
            slopes, _ = tf.clip_by_global_norm(slopes, job.clip_norm)
        rule.apply_gradients(list(zip(slopes, model.trainable_variables, strict=True)))
        return value

    for _ in range(passes):
        taken = 0
        for epoch in range(job.epochs):
            order, total = carpool.batch_order(job.seed, epoch, len(x)), 0.0
            for start in range(0, len(x), job.batch_size):
                batch = order[start : start + job.batch_size]
                value = step(tf.constant(x[batch]), tf.constant(y[batch]), step_seed(job.seed, taken))
                total, taken = total + float(value) * len(batch), taken + 1
            history.append(total / len(x))
    return Reference(_weights(model), {"state": _slots(rule, model)}, (), history[-job.epochs :])


def what_is_left(result: Result) -> Reference:
    return Reference(
        _weights(result.model), {"state": _slots(result.optimizer, result.model)}, (), result.history["loss"]
    )


def _weights(model: Any) -> dict[str, np.ndarray]:
    return {held.name: held.read().numpy() for held in variables(model)}


def _slots(optimizer: Any, model: Any) -> dict[str, np.ndarray]:
    if hasattr(
        optimizer, "get_slot_names"
    ):  # it lists its variables by names that depend on what was there before
        return {
            f"{name} {place}": optimizer.get_slot(variable, name).numpy()
            for name in optimizer.get_slot_names()
            for place, variable in enumerate(model.trainable_variables)
        }
    found: Any = optimizer.variables
    given: Any = found() if callable(found) else found
    return {f"{i}": np.asarray(v) for i, v in enumerate(given)}
