"""The JAX zoo of the conformance suite: models, optimizers, schedules, and the plain loop they are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import carpool
from carpool.jax import Model, step_key
from carpool.job import Job
from carpool.result import Result
from carpool.testing import Reference, Variant

SAMPLES, BATCH = 60, 16


def _dense(key: Any, inputs: int, outputs: int) -> dict[str, Any]:
    w = jax.random.normal(key, (inputs, outputs)) * inputs**-0.5
    return {"w": w, "b": jnp.zeros(outputs)}


def _layer(p: Any, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def _normed(p: Any, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return p["scale"] * centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) + p["shift"]


def mlp(key: Any) -> Model:
    a, b = jax.random.split(key)
    return Model(
        [_dense(a, 6, 12), _dense(b, 12, 3)], lambda p, x: _layer(p[1], jax.nn.relu(_layer(p[0], x)))
    )


def residual(key: Any) -> Model:
    a, b, c = jax.random.split(key, 3)

    def apply(p: Any, x: Any) -> Any:
        h = jax.nn.gelu(_layer(p["a"], x))
        return _layer(p["out"], h + jnp.tanh(_layer(p["b"], h)))

    return Model({"a": _dense(a, 6, 12), "b": _dense(b, 12, 12), "out": _dense(c, 12, 3)}, apply)


def layer_norm(key: Any) -> Model:
    a, b = jax.random.split(key)
    norm = {"scale": jnp.ones(12), "shift": jnp.zeros(12)}

    def apply(p: Any, x: Any) -> Any:
        return _layer(p["out"], jax.nn.silu(_normed(p["norm"], _layer(p["a"], x))))

    return Model({"a": _dense(a, 6, 12), "norm": norm, "out": _dense(b, 12, 3)}, apply)


def batch_norm(key: Any) -> Model:
    """Statistics beside the parameters, and a counter of whole numbers."""
    a, b = jax.random.split(key)

    def apply(p: Any, state: Any, x: Any, train: bool) -> Any:
        h = _layer(p["a"], x)
        mean, var = (h.mean(0), h.var(0)) if train else (state["mean"], state["var"])
        moved = {
            "mean": 0.9 * state["mean"] + 0.1 * mean,
            "var": 0.9 * state["var"] + 0.1 * var,
            "seen": state["seen"] + 1,
        }
        return _layer(
            p["out"], jax.nn.relu((h - mean) * jax.lax.rsqrt(var + 1e-5))
        ), moved if train else state

    state = {"mean": jnp.zeros(12), "var": jnp.ones(12), "seen": jnp.zeros((), jnp.int32)}
    return Model(
        {"a": {"w": _dense(a, 6, 12)["w"], "b": jnp.zeros(())}, "out": _dense(b, 12, 3)}, apply, state
    )


def tied(key: Any) -> Model:
    def apply(p: Any, x: Any) -> Any:
        return jnp.tanh(p["e"][_tokens(x)].mean(1)) @ p["e"].T

    return Model({"e": jax.random.normal(key, (7, 8)) * 0.3}, apply)


def _tokens(x: Any) -> Any:
    return (jnp.abs(x[:, :5]) * 3).astype(jnp.int32) % 7


def attention(key: Any) -> Model:
    a, b, c = jax.random.split(key, 3)
    norm = {"scale": jnp.ones(8), "shift": jnp.zeros(8)}
    p = {
        "e": jax.random.normal(a, (7, 8)) * 0.3,
        "qkv": _dense(b, 8, 24)["w"],
        "norm": norm,
        "out": _dense(c, 8, 3),
    }

    def apply(p: Any, x: Any) -> Any:
        y = p["e"][_tokens(x)]
        q, k, v = jnp.split(_normed(p["norm"], y) @ p["qkv"], 3, -1)
        y = y + jax.nn.softmax(q @ k.swapaxes(-1, -2) * 8**-0.5, -1) @ v
        return _layer(p["out"], y.mean(1))

    return Model(p, apply)


def convolution(key: Any) -> Model:
    a, b = jax.random.split(key)
    p = {"k": jax.random.normal(a, (3, 1, 4)) * 0.5, "out": _dense(b, 24, 3)}

    def apply(p: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x[..., None], p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return _layer(p["out"], jax.nn.relu(y).reshape(len(x), -1))

    return Model(p, apply)


def recurrent(key: Any) -> Model:
    a, b, c = jax.random.split(key, 3)

    def apply(p: Any, x: Any) -> Any:
        def cell(h: Any, now: Any) -> Any:
            z, r, n = jnp.split(_layer(p["x"], now[:, None]) + h @ p["h"], 3, -1)
            return jax.nn.sigmoid(z) * h + (1 - jax.nn.sigmoid(z)) * jnp.tanh(n * jax.nn.sigmoid(r)), None

        h, _ = jax.lax.scan(cell, jnp.zeros((len(x), 5), x.dtype), x.T)
        return _layer(p["out"], h)

    return Model({"x": _dense(a, 1, 15), "h": _dense(b, 5, 15)["w"], "out": _dense(c, 5, 3)}, apply)


def branching(key: Any) -> Model:
    """An `if` on a number that only the device knows."""

    def apply(p: Any, x: Any) -> Any:
        y = _layer(p, x)
        return jax.lax.cond(y.mean() > 0, lambda y: 2 * y, lambda y: y, y)

    return Model(_dense(key, 6, 3), apply)


def printing(key: Any) -> Model:
    """It calls back to Python."""

    def apply(p: Any, x: Any) -> Any:
        jax.debug.callback(lambda _: None, x[0, 0])
        return _layer(p, x)

    return Model(_dense(key, 6, 3), apply)


def dropout(key: Any) -> Model:
    a, b = jax.random.split(key)

    def apply(p: Any, x: Any, key: Any, train: bool) -> Any:
        h = jax.nn.relu(_layer(p[0], x))
        kept = jax.random.bernoulli(key, 0.8, h.shape) if train else 0.8
        return _layer(p[1], h * kept / 0.8)

    return Model([_dense(a, 6, 12), _dense(b, 12, 3)], apply)


def noisy(key: Any) -> Model:
    def apply(p: Any, x: Any, key: Any) -> Any:
        return _layer(p, x + 0.1 * jax.random.normal(key, x.shape, x.dtype))

    return Model(_dense(key, 6, 3), apply)


MODELS: Mapping[str, Callable[[Any], Model]] = {
    made.__name__: made
    for made in (
        mlp, residual, layer_norm, batch_norm, tied, attention, convolution, recurrent, branching, printing, dropout, noisy,
    )
}  # fmt: skip
RANDOM = ("dropout", "noisy")
ALONE = ("printing",)

Rated = Callable[[Any], Any]
OPTIMIZERS: Mapping[str, tuple[float, Rated]] = {
    "sgd": (0.05, optax.sgd),
    "nesterov": (0.02, partial(optax.sgd, momentum=0.9, nesterov=True)),
    "adamw": (0.01, partial(optax.adamw, weight_decay=0.1)),
    "amsgrad": (0.01, optax.amsgrad),
    "nadam": (0.01, optax.nadam),
    "radam": (0.01, optax.radam),
    "adamax": (0.01, optax.adamax),
    "adabelief": (0.01, optax.adabelief),
    "yogi": (0.01, optax.yogi),
    "rmsprop": (0.005, partial(optax.rmsprop, momentum=0.9, centered=True)),
    "adagrad": (0.05, optax.adagrad),
    "adadelta": (0.5, optax.adadelta),
    "lamb": (0.01, optax.lamb),
    "lars": (0.5, optax.lars),
    "novograd": (0.01, optax.novograd),
    "adan": (0.01, optax.adan),
    "lion": (0.002, optax.lion),
    "adafactor": (0.01, partial(optax.adafactor, min_dim_size_to_factor=4)),
    "chained": (0.01, lambda rate: optax.chain(optax.clip(0.5), optax.trace(0.5), optax.scale_by_learning_rate(rate))),
    "accumulated": (0.01, lambda rate: optax.MultiSteps(optax.adam(rate), 3)),
    "averaged": (0.01, lambda rate: optax.chain(optax.adam(rate), optax.ema(0.9))),
    "injected": (0.01, lambda rate: optax.inject_hyperparams(optax.adam)(learning_rate=rate)),
    "adam": (0.01, optax.adam),
}  # fmt: skip
SCHEDULES: Mapping[str, Callable[[float], Any]] = {
    "none": lambda rate: rate,
    "cosine": lambda rate: optax.cosine_decay_schedule(rate, 40),
    "exponential": lambda rate: optax.exponential_decay(rate, 10, 0.8, staircase=True),
    "warmup": lambda rate: optax.warmup_cosine_decay_schedule(rate / 10, rate, 8, 60),
    "piecewise": lambda rate: optax.piecewise_constant_schedule(rate, {15: 0.5, 30: 0.1}),
    "joined": lambda rate: optax.join_schedules([optax.linear_schedule(0.0, rate, 5), optax.constant_schedule(rate)], [5]),
    "one_cycle": lambda rate: optax.cosine_onecycle_schedule(60, rate),
}  # fmt: skip


@cache
def data(double: bool) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, 6)).astype(np.float64 if double else np.float32)
    return x, random.integers(0, 3, SAMPLES).astype(np.int32)


def loss(prediction: Any, target: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(prediction, target).mean()


def made(model: str, double: bool) -> Callable[[Any], Model]:
    """The factory, its floating point arrays in the wanted type."""
    wanted = jnp.float64 if double else jnp.float32

    def typed(leaf: Any) -> Any:
        return leaf.astype(wanted) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    def factory(key: Any) -> Model:
        found = MODELS[model](key)
        state = None if found.state is None else jax.tree.map(typed, found.state)
        return Model(jax.tree.map(typed, found.parameters), found.apply, state)

    return factory


def make_job(model: str, optimizer: str, scheduler: str, variant: Variant, double: bool) -> Job:
    rate, rule = OPTIMIZERS[optimizer]
    options = {"batch_size": BATCH, "epochs": variant.epochs, **variant.options}
    return Job(
        made(model, double),
        data(double),
        loss=loss,
        optimizer=rule(SCHEDULES[scheduler](rate * variant.scale)),
        seed=variant.seed,
        name=f"{model}-{variant.seed}",
        **options,
    )


def plain_loop(job: Job, passes: int = 1) -> Reference:
    """The job by hand: optax and a loop over `carpool.batch_order`."""
    x, y = job.data
    model = job.model(jax.random.key(job.seed))
    parameters, state, rule = model.parameters, model.state, job.optimizer
    slots, history = rule.init(parameters), []
    words = model.apply.__code__.co_varnames[: model.apply.__code__.co_argcount]

    def objective(p: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        given = ({"key": key} if "key" in words else {}) | ({"train": True} if "train" in words else {})
        held = () if state is None else (state,)
        out = model.apply(p, *held, x, **given)
        prediction, after = (out, None) if state is None else out
        return loss(prediction, y), after

    @jax.jit
    def step(p: Any, state: Any, slots: Any, x: Any, y: Any, key: Any) -> Any:
        (value, state), slopes = jax.value_and_grad(objective, has_aux=True)(p, state, x, y, key)
        if job.clip_norm is not None:
            slopes, _ = optax.clip_by_global_norm(job.clip_norm).update(slopes, optax.EmptyState())
        moves, slots = rule.update(slopes, slots, p)
        return optax.apply_updates(p, moves), state, slots, value

    for _ in range(passes):
        taken = 0
        for epoch in range(job.epochs):
            order, total = carpool.batch_order(job.seed, epoch, len(x)), 0.0
            for start in range(0, len(x), job.batch_size):
                batch = order[start : start + job.batch_size]
                key = step_key(job.seed, taken)
                parameters, state, slots, value = step(parameters, state, slots, x[batch], y[batch], key)
                total, taken = total + float(value) * len(batch), taken + 1
            history.append(total / len(x))
    return Reference(_named((parameters, state)), {"state": _named(slots)}, (), history[-job.epochs :])


def what_is_left(result: Result) -> Reference:
    model = result.model
    weights = _named((model.parameters, model.state))
    return Reference(weights, {"state": _named(result.optimizer)}, (), result.history["loss"])


def _named(nest: Any) -> dict[str, np.ndarray]:
    found, _ = jax.tree_util.tree_flatten_with_path(nest)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}
