"""Keras models, optimizers and schedules for the tests, small and with weights of their own seed; and how runs are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import carpool

BACKEND = keras.backend.backend()
RTOL = 1e-5
"""Of a history beside `fit`'s, in single precision after a few epochs."""

SAMPLES, CLASSES = 26, 3
"""Not a multiple of the batch size: the last batch of an epoch is short."""


def arrays(*shape: int, samples: int = SAMPLES, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of this shape, and classes that hang on them."""
    numbers = np.random.default_rng(seed)
    x = numbers.normal(size=(samples, *shape)).astype("float32")
    scores = x.reshape(samples, -1)[:, :CLASSES] + numbers.normal(size=(samples, CLASSES)) / 4
    return x, scores.argmax(1).astype("int32")


def tokens(samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    x = numbers.integers(1, 9, size=(samples, 6)).astype("int32")
    return x, (x.sum(1) % CLASSES).astype("int32")


# Models: name -> (input shape, its layers)

MODELS: dict[str, tuple[tuple[int, ...], Callable[[], list[Any]]]] = {
    "mlp": ((5,), lambda: [layers.Dense(6, activation="relu")]),
    "batch norm": (
        (5,),  # the norm takes a bias out again: optimizers would follow the rounding of its gradient
        lambda: [layers.Dense(6, use_bias=False), layers.BatchNormalization(), layers.ReLU()],
    ),
    "layer norm": ((5,), lambda: [layers.Dense(6), layers.LayerNormalization(), layers.PReLU()]),
    "group norm": ((4, 6), lambda: [layers.GroupNormalization(2), layers.Flatten()]),
    "conv1d": ((8, 3), lambda: [layers.Conv1D(4, 3, activation="relu"), layers.GlobalAveragePooling1D()]),
    "conv2d": ((6, 6, 2), lambda: [layers.Conv2D(3, 3), layers.MaxPooling2D(), layers.Flatten()]),
    "conv3d": ((4, 4, 4, 1), lambda: [layers.Conv3D(2, 2), layers.AveragePooling3D(2), layers.Flatten()]),
    "separable": (
        (6, 6, 2),
        lambda: [layers.SeparableConv2D(3, 3), layers.DepthwiseConv2D(2), layers.GlobalMaxPooling2D()],
    ),
    "transposed": (
        (4, 4, 1),
        lambda: [layers.Conv2DTranspose(2, 2), layers.UpSampling2D(), layers.Flatten()],
    ),
    "lstm": ((5, 3), lambda: [layers.LSTM(4)]),
    "gru": ((5, 3), lambda: [layers.GRU(4, return_sequences=True), layers.Flatten()]),
    "bidirectional": ((5, 3), lambda: [layers.Bidirectional(layers.LSTM(3))]),
    "embedding": ((6,), lambda: [layers.Embedding(10, 4, mask_zero=True), layers.GRU(4)]),
    "attention": ((5, 4), lambda: [_attending(), layers.GlobalAveragePooling1D()]),
    "own layer": ((5, 4), lambda: [_Attending(), layers.GlobalAveragePooling1D()]),
    "preprocessing": ((5,), lambda: [layers.Rescaling(0.5), _normalized(), layers.Dense(4)]),
    "discretized": (
        (5,),
        lambda: [
            layers.Discretization([-1.0, 0.0, 1.0]),
            layers.CategoryEncoding(4, "count"),
            layers.Dense(4),
        ],
    ),
    "dropout": ((5,), lambda: [layers.Dense(6, activation="relu"), layers.Dropout(0.3)]),
    "noise": (
        (5,),
        lambda: [layers.GaussianNoise(0.1), layers.Dense(6), layers.GaussianDropout(0.2)],
    ),
    "spatial dropout": (
        (6, 3),
        lambda: [layers.SpatialDropout1D(0.3), layers.Conv1D(4, 2), layers.Flatten()],
    ),
    "flipped": ((6, 6, 1), lambda: [layers.RandomFlip(), layers.Conv2D(2, 3), layers.Flatten()]),
    "recurrent dropout": ((5, 3), lambda: [layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2)]),
}
RANDOM = ("dropout", "noise", "spatial dropout", "flipped", "recurrent dropout")
UNFUSED = ("own layer", *(("preprocessing", "discretized") if keras.backend.backend() == "torch" else ()))
SINGLE = {"jax": ("layer norm", "group norm"), "torch": tuple(MODELS), "tensorflow": ()}[BACKEND]
"""Those in which Keras makes float32 of float64, as it does there wherever types meet."""


def _attending() -> Any:
    """Attention of a sequence to itself, of Keras' own layers. A bias of keys has no gradient but its rounding."""
    x = keras.Input((5, 4))
    return keras.Model(x, layers.Add()([x, layers.MultiHeadAttention(2, 3, use_bias=False)(x, x)]))


class _Attending(layers.Layer):
    """The same as a layer of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 3, use_bias=False)

    def build(self, input_shape: Any) -> None:
        self.attend.build(input_shape, input_shape)

    def call(self, x: Any) -> Any:
        return x + self.attend(x, x)


def _normalized() -> Any:
    made = layers.Normalization()
    made.adapt(arrays(5)[0])
    return made


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
    "RMSprop": lambda rate: keras.optimizers.RMSprop(rate, momentum=0.5, centered=True),
    "Adam": lambda rate: keras.optimizers.Adam(rate, amsgrad=True),
    "AdamW": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.01),
    "Adadelta": keras.optimizers.Adadelta,
    "Adagrad": keras.optimizers.Adagrad,
    "Adamax": keras.optimizers.Adamax,
    "Adafactor": keras.optimizers.Adafactor,
    "Nadam": keras.optimizers.Nadam,
    "Ftrl": keras.optimizers.Ftrl,
    "Lion": keras.optimizers.Lion,
    "Lamb": keras.optimizers.Lamb,
    "loss scale": lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)),
    "clipnorm": lambda rate: keras.optimizers.SGD(rate, clipnorm=0.5),
    "clipvalue": lambda rate: keras.optimizers.SGD(rate, clipvalue=0.05),
    "global_clipnorm": lambda rate: keras.optimizers.Adam(rate, global_clipnorm=0.5),
    "ema": lambda rate: keras.optimizers.SGD(rate, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulated": lambda rate: keras.optimizers.SGD(rate, gradient_accumulation_steps=2),
    "decayed": lambda rate: keras.optimizers.SGD(rate, weight_decay=0.1),
}

SCHEDULES: dict[str, Callable[[float], Any]] = {
    "constant": lambda rate: rate,
    "exponential": lambda rate: keras.optimizers.schedules.ExponentialDecay(rate, 4, 0.7),
    "cosine": lambda rate: keras.optimizers.schedules.CosineDecay(
        rate, 10, warmup_target=2 * rate, warmup_steps=3
    ),
    "piecewise": lambda rate: keras.optimizers.schedules.PiecewiseConstantDecay(
        [3, 6], [rate, rate / 2, rate / 4]
    ),
    "inverse time": lambda rate: keras.optimizers.schedules.InverseTimeDecay(rate, 3, 0.5, staircase=True),
}


def sequential(
    kind: str = "mlp",
    seed: int = 0,
    rate: float = 0.05,
    optimizer: str = "SGD",
    schedule: str = "constant",
    **compile: Any,
) -> Any:
    """A compiled model of the zoo. Keras' generators are left as they were found."""
    with seeded(seed):
        shape, made = MODELS[kind]
        dtype = "int32" if kind == "embedding" else None
        model = keras.Sequential(
            [keras.Input(shape, dtype=dtype), *made(), layers.Dense(CLASSES, activation="softmax")]
        )
    model.compile(
        optimizer=OPTIMIZERS[optimizer](SCHEDULES[schedule](rate)),
        **{"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **compile},
    )
    return model


@cache
def data_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    return tokens() if kind == "embedding" else arrays(*MODELS[kind][0])


class seeded:
    """Weights made inside are those of the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        import random

        self._states = random.getstate(), np.random.get_state()
        keras.utils.set_random_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        import random

        random.setstate(self._states[0])
        np.random.set_state(self._states[1])


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Models made, compiled and fitted inside compute in this type of number."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
    try:
        with _numbers_of_64_bits() if BACKEND == "jax" and name == "float64" else nullcontext():
            yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


@contextmanager
def _numbers_of_64_bits() -> Iterator[None]:
    """JAX has none unless it is told to; told in all threads, for models fit in threads too."""
    import jax

    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


# Functional and subclassed models


def two_in_two_out(seed: int = 0) -> Any:
    """Inputs by name, a layer that both share, outputs with a loss, a weight and a metric of their own."""
    with seeded(seed):
        left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
        shared = layers.Dense(5, activation="tanh", kernel_regularizer="l2")
        inner = keras.Sequential([layers.Dense(4, activation="relu"), layers.Dense(4)])
        mixed = inner(layers.concatenate([shared(left), shared(right)]))
        outputs = {
            "kind": layers.Dense(CLASSES, activation="softmax", name="kind")(mixed),
            "size": layers.Dense(1, name="size", kernel_constraint="non_neg")(mixed),
        }
        model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


def two_in_two_out_data() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    (left, kinds), (right, _) = arrays(4), arrays(4, seed=1)
    return {"left": left, "right": right}, {"kind": kinds, "size": left.sum(1, keepdims=True)}


class Scaled(layers.Layer):
    """A layer of the user's own, with a loss of its own."""

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        size: Any = ops.sum(ops.square(self.scale))
        self.add_loss(0.01 * size)
        return x * self.scale


class Own(keras.Model):
    """A subclassed model with layers of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled = layers.Dense(6, activation="relu"), Scaled()
        self.last = layers.Dense(CLASSES, activation="softmax")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.scaled(self.first(x)))


class Penalized(keras.Sequential):
    """A loss of the model's own on top of the compiled one."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        size: Any = ops.mean(ops.square(y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * size


class Share(keras.Metric):
    """The share of samples in class 0: a metric of the user's own."""

    def __init__(self, name: str = "share") -> None:
        super().__init__(name=name)
        self.first = self.add_weight(name="first", initializer="zeros")
        self.all = self.add_weight(name="all", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        chosen = ops.cast(ops.equal(ops.argmax(y_pred, -1), 0), "float32")
        self.first.assign_add(ops.sum(chosen))
        self.all.assign_add(ops.cast(ops.size(chosen), "float32"))

    def result(self) -> Any:
        return self.first / ops.maximum(self.all, 1.0)


def compiled(model: Any, seed: int = 0, **compile: Any) -> Any:
    model.compile(
        **{
            "optimizer": keras.optimizers.SGD(0.05),
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            **compile,
        }
    )
    return model


# Comparing


def alone(model: Any, x: Any, y: Any = None, **arguments: Any) -> Mapping[str, list[float]]:
    """Keras' own fit, in the order of the data."""
    return model.fit(x, y, verbose=0, **{"shuffle": False, "batch_size": 8, "epochs": 3, **arguments}).history


def ours(models: Any, x: Any, y: Any = None, **arguments: Any) -> carpool.Results:
    settings = {"shuffle": False, "batch_size": 8, "epochs": 3, "reporters": [], "device": "cpu", **arguments}
    results = carpool.fit(models, x, y, **settings)
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def variables(model: Any) -> dict[str, np.ndarray]:
    """Everything training changes but the metrics, by place."""
    parts = {"weight": model.variables, "slot": model.optimizer.variables}
    return {
        f"{part} {number} {variable.name}": np.asarray(keras.ops.convert_to_numpy(variable))
        for part, held in parts.items()
        for number, variable in enumerate(held)
    }


def assert_history(got: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = RTOL) -> None:
    assert set(got) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(_numbers(got[name]), _numbers(values), rtol=rtol, atol=1e-6, err_msg=name)


def _numbers(values: Any) -> Any:
    """On the host: torch's may be tensors on a GPU."""
    if isinstance(values, list | tuple):
        return [_numbers(value) for value in values]
    return keras.ops.convert_to_numpy(values)


def assert_same_model(got: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    ours, theirs = list(variables(got).items()), list(variables(expected).items())
    assert len(ours) == len(theirs)
    for (name, value), (_, other) in zip(ours, theirs, strict=True):
        if value.dtype.kind == "f":
            np.testing.assert_allclose(value, other, rtol=rtol, atol=atol, err_msg=name)


def assert_as_alone(
    build: Callable[[], Any], x: Any, y: Any = None, rtol: float = RTOL, **arguments: Any
) -> carpool.Result:
    """One model fitted by Keras, one by carpool: equal histories, weights and optimizer states."""
    reference, model = build(), build()
    expected = alone(reference, x, y, **arguments)
    result = ours([model], x, y, **arguments)[0]
    assert_history(result.history, expected, rtol)
    assert_history(model.history.history, expected, rtol)
    assert model.history.epoch == reference.history.epoch
    assert result.model is model
    assert_same_model(model, reference)
    return result
