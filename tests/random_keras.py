"""Random Keras jobs in float32, on the backend that is loaded. Shapes are few, so that programs are compiled for many sets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import keras
import numpy as np
from keras import layers

import carpool
from carpool.result import Result

CLASSES = 3

# No bias before a norm over samples: its true gradient is zero (docs/fidelity.md).
MODELS: dict[str, tuple[tuple[int, ...], Callable[[], list[Any]]]] = {
    "mlp": ((5,), lambda: [layers.Dense(6, activation="tanh")]),
    "dropout": ((5,), lambda: [layers.Dense(6, activation="gelu"), layers.Dropout(0.3)]),
    "batch norm": (
        (5,),
        lambda: [layers.Dense(6, use_bias=False), layers.BatchNormalization(), layers.Activation("tanh")],
    ),
    "layer norm": ((5,), lambda: [layers.Dense(6), layers.LayerNormalization()]),
    "conv": ((6, 6, 1), lambda: [layers.Conv2D(2, 3, activation="tanh"), layers.Flatten()]),
    "lstm": ((4, 3), lambda: [layers.LSTM(4)]),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": keras.optimizers.SGD,
    "momentum": partial(keras.optimizers.SGD, momentum=0.9),
    "adam": partial(keras.optimizers.Adam, epsilon=1e-4),
    "rmsprop": partial(keras.optimizers.RMSprop, epsilon=1e-4),
}
SOURCES = (*["arrays"] * 7, "generator", "noisy generator", "eager")


@dataclass(frozen=True)
class KerasCase:
    name: str
    model: str
    optimizer: str
    lr: float
    table: int
    batch_size: int
    epochs: int
    seed: int
    shuffle: bool
    validates: bool
    stops: bool
    source: str
    fault: str | None
    moment: int


class Raised(RuntimeError):
    """What a fault raises."""


class Noisy(layers.Layer):
    """Draws from Keras' own, NumPy's and Python's generators; only operator by operator does that mean anything."""

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        return x + keras.random.normal((1,)) / 10 + np.random.randn() / 10 + random.random() / 10


def _case(draw: random.Random, number: int, like: KerasCase | None) -> KerasCase:
    return KerasCase(
        name=f"job {number}",
        model=like.model if like else draw.choice(list(MODELS)),
        optimizer=like.optimizer if like else draw.choice(list(OPTIMIZERS)),
        lr=draw.choice([0.003, 0.01, 0.03]),
        table=draw.randint(0, 2),
        batch_size=8,
        epochs=draw.randint(1, 3),
        seed=draw.randint(0, 4),
        shuffle=draw.random() < 0.7,
        validates=draw.random() < 0.3,
        stops=draw.random() < 0.2,
        source=like.source if like else draw.choice(SOURCES),
        fault=draw.choice(["factory", "callback", "source"]) if draw.random() < 0.1 else None,
        moment=draw.randint(0, 5),
    )


@cache
def _table(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    x = numbers.normal(size=(20, *shape)).astype("float32")
    return x, numbers.integers(0, CLASSES, 20).astype("int32")


def _made(case: KerasCase) -> keras.Model:
    if case.fault == "factory":
        raise Raised("no model today")
    shape, middle = MODELS[case.model]
    eager = case.source == "eager"
    parts = [Noisy()] if eager else []
    out = [layers.Flatten(), layers.Dense(CLASSES, activation="softmax")]
    model = keras.Sequential([keras.Input(shape), *parts, *middle(), *out])
    optimizer = OPTIMIZERS[case.optimizer](case.lr)
    model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=eager)
    return model


def _batches(case: KerasCase) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    x, y = _table(MODELS[case.model][0], case.table)
    read = 0
    while True:  # as Keras wants generators that are read for several epochs
        for start in range(0, len(x), case.batch_size):
            if case.fault == "source" and read == case.moment:
                raise Raised("the source has had enough")
            read += 1
            part = x[start : start + case.batch_size]
            if case.source == "noisy generator":
                part = part + np.float32(np.random.randn() / 10 + random.random() / 10)
            yield part, y[start : start + case.batch_size]


class Failing(keras.callbacks.Callback):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._at = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._at:
            raise Raised("the callback calls nobody")


def _callbacks(case: KerasCase) -> list[Any]:
    made: list[Any] = [Failing(case.moment % case.epochs)] if case.fault == "callback" else []
    if case.stops:
        watched = "val_loss" if case.validates else "loss"
        least: Any = 1e-3  # without it a plateau would be decided by the last bit
        made.append(keras.callbacks.EarlyStopping(watched, min_delta=least, patience=1))
    return made


class Keras:
    """Keras jobs in float32."""

    def cases(self, draw: random.Random) -> tuple[list[KerasCase], str]:
        first = _case(draw, 0, None)
        alike = draw.random() < 0.7
        alone = alike and first.source != "arrays"  # each is compiled by itself, or runs operator by operator
        most = 2 if alone else 4
        rest = [_case(draw, number, first if alike else None) for number in range(1, draw.randint(1, most))]
        return [first, *rest], draw.choice(["auto", "auto", "auto", "interleaved", "in_turn"])

    def build(self, case: KerasCase) -> carpool.Job:
        table = _table(MODELS[case.model][0], case.table)
        streams = "generator" in case.source
        fit = {"steps_per_epoch": 3} if streams else {}
        return carpool.Job(
            partial(_made, case),
            _batches(case) if streams else table,
            name=case.name,
            validation_data=_table(MODELS[case.model][0], 9) if case.validates else None,
            batch_size=case.batch_size,
            epochs=case.epochs,
            seed=case.seed,
            shuffle=case.shuffle,
            callbacks=_callbacks(case),
            fit=fit,
        )

    def weights(self, result: Result) -> Mapping[str, np.ndarray]:
        held = enumerate(result.model.variables)
        return {str(place): np.asarray(keras.ops.convert_to_numpy(v)) for place, v in held}

    def alone(self, case: KerasCase, strategy: str) -> str:
        if keras.backend.backend() == "torch" and case.model == "dropout":
            return (
                "in_turn" if strategy == "in_turn" else "auto"
            )  # in turn Keras draws the masks, otherwise they are keyed
        return "in_turn"

    def allowed(self, case: KerasCase, exact: bool) -> float:
        return 0.0 if exact else 1e-4

    def by_hand(self, case: KerasCase) -> Mapping[str, np.ndarray] | None:
        return None


MADE = Keras()
