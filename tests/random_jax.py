"""Random JAX jobs in float32. Shapes are few, so that programs are compiled for many sets at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import carpool
from carpool.jax import Model
from carpool.result import Result

INPUTS, CLASSES = 6, 3


def _dense(key: Any, inputs: int, outputs: int) -> dict[str, Any]:
    return {"w": jax.random.normal(key, (inputs, outputs)) * inputs**-0.5, "b": jnp.zeros(outputs)}


def _layer(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def _mlp(key: Any, between: Callable[[Any], Any] = jnp.tanh) -> Model:
    a, b = jax.random.split(key)
    return Model([_dense(a, INPUTS, 8), _dense(b, 8, CLASSES)], partial(_two, between))


def _two(between: Callable[[Any], Any], p: Any, x: Any) -> Any:
    return _layer(p[1], between(_layer(p[0], x)))


def _normed(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return jax.nn.silu(centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3))


def _convolution(key: Any) -> Model:
    a, b = jax.random.split(key)
    return Model({"k": jax.random.normal(a, (3, 1, 2)) * 0.5, "out": _dense(b, 12, CLASSES)}, _convolved)


def _convolved(p: Any, x: Any) -> Any:
    words = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(x[..., None], p["k"], (1,), "SAME", dimension_numbers=words)
    return _layer(p["out"], jnp.tanh(y).reshape(len(x), -1))


def _drawn(key: Any) -> Model:
    """A factory that draws from NumPy's and Python's generators instead of its key."""
    scale = 1 + random.random() / 10
    model = _mlp(key)
    model.parameters[0]["w"] = jnp.asarray(np.random.randn(INPUTS, 8) * scale / 3, jnp.float32)
    return model


MODELS: dict[str, Callable[[Any], Model]] = {
    "mlp": _mlp,
    "layer norm": partial(_mlp, between=_normed),
    "convolution": _convolution,
    "drawn": _drawn,
}
OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": partial(optax.sgd, momentum=0.9),
    "adam": partial(optax.adam, eps=1e-4),
    "adamw": partial(optax.adamw, eps=1e-4, weight_decay=0.1),
}
SOURCES = ("arrays", "arrays", "arrays", "function", "generator", "noisy generator")


@dataclass(frozen=True)
class JaxCase:
    name: str
    model: str
    optimizer: str
    lr: float
    table: int
    samples: int
    batch_size: int
    epochs: int
    seed: int
    shuffle: bool
    index: bool
    validates: bool
    patience: int | None
    dropout: bool
    source: str
    fault: str | None
    moment: int


class Raised(RuntimeError):
    """What a fault raises."""


def _case(draw: random.Random, number: int, like: JaxCase | None) -> JaxCase:
    source = like.source if like else draw.choice(SOURCES)
    validates = like.validates if like else draw.random() < 0.3
    return JaxCase(
        name=f"job {number}",
        model=like.model if like else draw.choice(list(MODELS)),
        optimizer=like.optimizer if like else draw.choice(list(OPTIMIZERS)),
        lr=draw.choice([0.01, 0.03, 0.1]),
        table=draw.randint(0, 2),
        samples=draw.choice([24, 29]),
        batch_size=like.batch_size if like else draw.choice([8, 12]),
        epochs=draw.randint(1, 3),
        seed=draw.randint(0, 5),
        shuffle=draw.random() < 0.8,
        index=source == "arrays" and draw.random() < 0.2,
        validates=validates,
        patience=draw.randint(1, 2) if validates and draw.random() < 0.4 else None,
        dropout=like.dropout if like else draw.random() < 0.3,
        source=source,
        fault=draw.choice(["factory", "callback", "source", "nan"]) if draw.random() < 0.1 else None,
        moment=draw.randint(0, 5),
    )


@cache
def _table(seed: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    x = numbers.normal(size=(samples, INPUTS)).astype("float32")
    return x, numbers.integers(0, CLASSES, samples)


def _arrays(case: JaxCase) -> tuple[np.ndarray, np.ndarray]:
    x, y = _table(case.table, case.samples)
    if case.fault == "nan":
        x = x.copy()
        x[case.moment] = np.nan
    return x, y


class Passes:
    """What makes a new generator for each pass."""

    def __init__(self, case: JaxCase) -> None:
        self._case, self._read = case, 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        x, y = _arrays(self._case)
        for start in range(0, len(x), self._case.batch_size):
            if self._case.fault == "source" and self._read == self._case.moment:
                raise Raised("the source has had enough")
            self._read += 1
            part = x[start : start + self._case.batch_size]
            if self._case.source == "noisy generator":
                part = part + np.float32(np.random.randn() / 10 + random.random() / 10)
            yield part, y[start : start + self._case.batch_size]


def _made(case: JaxCase, key: Any) -> Model:
    if case.fault == "factory":
        raise Raised("no model today")
    return MODELS[case.model](key)


def _step(model: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    return _loss(model(x * kept), y)


def _loss(prediction: Any, target: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(prediction, target).mean()


def _callbacks(case: JaxCase) -> list[Callable[[Any], None]]:
    def failing(event: Any) -> None:
        if event.epoch == case.moment % case.epochs:
            raise Raised("the callback calls nobody")

    return [failing] if case.fault == "callback" else []


def _data(case: JaxCase) -> Any:
    if case.source in ("generator", "noisy generator"):
        return Passes(case)
    arrays = _arrays(case)
    return (lambda: arrays) if case.source == "function" else arrays


class Jax:
    """JAX jobs in float32."""

    def cases(self, draw: random.Random) -> tuple[list[JaxCase], str]:
        first = _case(draw, 0, None)
        alike = draw.random() < 0.7
        rest = [_case(draw, number, first if alike else None) for number in range(1, draw.randint(1, 6))]
        return [first, *rest], draw.choice(["auto", "auto", "auto", "interleaved", "in_turn"])

    def build(self, case: JaxCase) -> carpool.Job:
        stop = carpool.EarlyStopping("val_loss", case.patience, 1e-3) if case.patience is not None else None
        index = np.random.default_rng(case.table).integers(0, case.samples, 20) if case.index else None
        said: dict[str, Any] = {"step": _step} if case.dropout else {"loss": _loss}
        return carpool.Job(
            partial(_made, case),
            _data(case),
            name=case.name,
            optimizer=OPTIMIZERS[case.optimizer](case.lr),
            validation_data=_table(9, 10) if case.validates else None,
            batch_size=case.batch_size,
            epochs=case.epochs,
            seed=case.seed,
            shuffle=case.shuffle,
            index=index,
            stop=stop,
            callbacks=_callbacks(case),
            **said,
        )

    def weights(self, result: Result) -> Mapping[str, np.ndarray]:
        leaves = jax.tree_util.tree_leaves_with_path(result.model.parameters)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def alone(self, case: JaxCase, strategy: str) -> str:
        return "in_turn"

    def allowed(self, case: JaxCase, exact: bool) -> float:
        return 0.0 if exact else 1e-4

    def by_hand(self, case: JaxCase) -> Mapping[str, np.ndarray] | None:
        return None


MADE = Jax()
