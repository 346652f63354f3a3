"""Small TensorFlow 1 graphs, the plain session loops that they are held against, and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import carpool
from carpool.job import Job
from carpool.tensorflow import Graph
from carpool.testing import Reference

v1 = tf.compat.v1
ROWS = 40


def data(dtype: str = "float32", rows: int = ROWS) -> dict[str, np.ndarray]:
    drawn = np.random.RandomState(7)
    x = drawn.randn(rows, 6).astype(dtype)
    return {"x": x, "y": (x[:, :1] - 0.5 * x[:, 1:2] ** 2).astype(dtype)}


DATA = {dtype: data(dtype) for dtype in ("float32", "float64")}


def _dense(x: Any, width: int = 5) -> Any:
    kind = x.dtype
    first = v1.get_variable("first", [6, width], kind, v1.glorot_uniform_initializer())
    second = v1.get_variable("second", [width, 1], kind, v1.glorot_uniform_initializer())
    return tf.tanh(x @ first) @ second


def _wide(x: Any) -> Any:
    return _dense(x, 9)


def _convolving(x: Any) -> Any:
    kind = x.dtype
    kernel = v1.get_variable("kernel", [3, 1, 4], kind, v1.glorot_uniform_initializer())
    last = v1.get_variable("last", [4, 1], kind, v1.glorot_uniform_initializer())
    bias = v1.get_variable("bias", [4], kind, v1.zeros_initializer())
    hidden = tf.nn.relu(tf.nn.conv1d(x[:, :, None], kernel, stride=1, padding="VALID") + bias)
    return tf.reduce_mean(hidden, axis=1) @ last


def _looping(x: Any) -> Any:
    weight = v1.get_variable("weight", [6, 6], x.dtype, v1.orthogonal_initializer())
    last = v1.get_variable("last", [6, 1], x.dtype, v1.glorot_uniform_initializer())
    _, hidden = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ weight)), (0, x))
    return hidden @ last


def _dropping(x: Any) -> Any:
    """Random numbers in the graph: a session draws them from the graph's seed, whoever runs beside it."""
    return _dense(tf.nn.dropout(x, rate=0.3))


MODELS: Mapping[str, Callable[[Any], Any]] = {
    "dense": _dense,
    "wide": _wide,
    "convolving": _convolving,
    "looping": _looping,
    "dropping": _dropping,
}
OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "sgd": lambda rate: v1.train.GradientDescentOptimizer(rate),
    "momentum": lambda rate: v1.train.MomentumOptimizer(rate, 0.9),
    "rmsprop": lambda rate: v1.train.RMSPropOptimizer(rate),
    "adagrad": lambda rate: v1.train.AdagradOptimizer(rate),
    "adam": lambda rate: v1.train.AdamOptimizer(rate),
}
SCHEDULERS: Mapping[str, Callable[[float, Any], Any]] = {
    "constant": lambda rate, step: rate,
    "decay": lambda rate, step: v1.train.exponential_decay(rate, step, 5, 0.8),
}


def builder(
    model: str = "dense",
    optimizer: str = "adam",
    scheduler: str = "constant",
    rate: float = 0.01,
    dtype: str = "float32",
) -> Callable[[], dict[str, Any]]:
    """A function that builds such a graph."""

    def build() -> dict[str, Any]:
        x = v1.placeholder(dtype, [None, 6], name="x")
        y = v1.placeholder(dtype, [None, 1], name="y")
        made = MODELS[model](x)
        loss = tf.reduce_mean((made - y) ** 2, name="loss")
        step = v1.train.get_or_create_global_step()
        train = OPTIMIZERS[optimizer](SCHEDULERS[scheduler](rate, step)).minimize(loss, step, name="train")
        return {"x": x, "y": y, "loss": loss, "train": train, "made": made}

    return build


def job(name: str | None = None, seed: int = 0, epochs: int = 2, batch_size: int = 8, **options: Any) -> Job:
    """A plain job of the zoo."""
    graph = Graph(builder(**options), {"loss": "loss"}, train_op="train")
    return Job(
        graph,
        DATA[options.get("dtype", "float32")],
        name=name,
        seed=seed,
        epochs=epochs,
        batch_size=batch_size,
    )


def plain_loop(job: Job, passes: int = 1) -> Reference:
    """The job in a session of its own, by hand: feed dicts, one batch after another."""
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(job.seed)
        made = job.model.graph()
        init = v1.global_variables_initializer()
        variables = {one.op.name: one for one in v1.global_variables()}
    x, y = job.data["x"], job.data["y"]
    history: list[float] = []
    with v1.Session(graph=graph) as session:
        session.run(init)
        for _ in range(passes):
            history.clear()
            for epoch in range(job.epochs):
                order = carpool.batch_order(job.seed, epoch, len(x)) if job.shuffle else np.arange(len(x))
                total = 0.0
                for start in range(0, len(x), job.batch_size):
                    rows = order[start : start + job.batch_size]
                    _, loss = session.run(
                        [made["train"], made["loss"]], {made["x"]: x[rows], made["y"]: y[rows]}
                    )
                    total += float(loss) * len(rows)
                history.append(total / len(x))
        return Reference(session.run(variables), {}, [], history)
