"""Eight small TensorFlow 1 graphs: a session loop by hand for each, one after another, beside `carpool.train`, everything built anew in each window.

By hand is what people write: a session, `global_variables_initializer`, and `session.run` with a feed dict a step. Both ends are compared to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf

import carpool
from carpool.tensorflow import Graph

v1 = tf.compat.v1
GRAPHS, ROWS, BATCH, EPOCHS = 8, 4096, 32, 8
Values = dict[str, np.ndarray]


def data(rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((rows, 20)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :1]) - 0.5 * x[:, 1:2]}


def network(width: int) -> dict[str, Any]:
    """A net of one hidden layer with Adam."""
    x = v1.placeholder(tf.float32, [None, 20], name="x")
    y = v1.placeholder(tf.float32, [None, 1], name="y")
    hidden = tf.tanh(x @ v1.get_variable("first", [20, width]) + v1.get_variable("bias", [width]))
    loss = tf.reduce_mean((hidden @ v1.get_variable("second", [width, 1]) - y) ** 2, name="loss")
    return {"x": x, "y": y, "loss": loss, "train": v1.train.AdamOptimizer(1e-3).minimize(loss)}


def width(number: int) -> int:
    return 32 + 8 * number


def by_hand(number: int, arrays: dict[str, np.ndarray], epochs: int) -> Values:
    """One graph in a session of its own."""
    x, y = arrays["x"], arrays["y"]
    with tf.Graph().as_default():
        v1.set_random_seed(number)
        made = network(width(number))
        init, variables = v1.global_variables_initializer(), {v.op.name: v for v in v1.global_variables()}
        with v1.Session() as session:
            session.run(init)
            for epoch in range(epochs):
                order = carpool.batch_order(number, epoch, len(x))
                for start in range(0, len(x), BATCH):
                    rows = order[start : start + BATCH]
                    feed = {made["x"]: x[rows], made["y"]: y[rows]}
                    session.run([made["train"], made["loss"]], feed_dict=feed)
            return session.run(variables)


def jobs(arrays: dict[str, np.ndarray], epochs: int) -> list[carpool.Job]:
    return [
        carpool.Job(
            Graph(lambda number=number: network(width(number)), ["loss"], train_op="train"),
            arrays,
            name=f"graph {number}",
            seed=number,
            batch_size=BATCH,
            epochs=epochs,
        )
        for number in range(GRAPHS)
    ]


def run(windows: int, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of each way in alternating windows, and how much faster carpool is."""
    arrays, epochs = data(256 if quick else ROWS), 1 if quick else EPOCHS
    kept: dict[str, list[Values]] = {}

    def trained(strategy: str) -> list[Values]:
        done = carpool.train(jobs(arrays, epochs), device="cpu", strategy=strategy, reporters=[])
        return [result.model.variables for result in done]

    def in_threads() -> list[Values]:
        with ThreadPoolExecutor(GRAPHS) as threads:
            return list(threads.map(lambda number: by_hand(number, arrays, epochs), range(GRAPHS)))

    ways: dict[str, Callable[[], list[Values]]] = {
        "by hand, one after another": lambda: [by_hand(n, arrays, epochs) for n in range(GRAPHS)],
        "by hand, a thread each": in_threads,
        "carpool, one after another": lambda: trained("in_turn"),
        "carpool": lambda: trained("auto"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for window in range(windows):
        for name, way in ways.items():
            began = time.perf_counter()
            kept[name] = way()
            seconds[name].append(time.perf_counter() - began)
            say(f"window {window + 1}: {name}: {seconds[name][-1]:.2f} s")
    middle = {name: median(taken) for name, taken in seconds.items()}
    first = next(iter(ways))
    steps = GRAPHS * epochs * -(-len(arrays["x"]) // BATCH)
    return {
        "graphs": GRAPHS,
        "steps": steps,
        "seconds": seconds,
        "scores": {
            "steps a second": {name: round(steps / taken) for name, taken in middle.items()},
            "times one after another by hand": {
                name: round(middle[first] / taken, 2) for name, taken in middle.items()
            },
            "times one after another by carpool": round(
                middle["carpool, one after another"] / middle["carpool"], 2
            ),
            "identical to the bit": all(
                all((one[name] == other[name]).all() for name in one)
                for one, other in zip(kept[first], kept["carpool"], strict=True)
            ),
        },
    }
