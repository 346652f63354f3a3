"""Two graphs of different width, each run in a process of its own: what is sent is how to build a graph, not its tensors."""

import numpy as np
import tensorflow as tf

import carpool
from carpool.tensorflow import Graph

v1 = tf.compat.v1


def scorer(width):
    def build():  # called in the process that runs the graph
        x = v1.placeholder(tf.float32, [None, width], name="x")
        weights = v1.get_variable("weights", [width, 1], initializer=v1.ones_initializer())
        return {"x": x, "score": tf.reduce_sum(x @ weights, 1)}

    return build


def main():
    widths = {"narrow": 3, "wide": 7}
    rows = {name: np.arange(4 * width, dtype="float32").reshape(4, width) for name, width in widths.items()}
    jobs = [
        carpool.Job(Graph(scorer(width), ["score"]), {"x": rows[name]}, name=name, timeout_s=120)
        for name, width in widths.items()
    ]
    results = carpool.train(jobs, device="cpu", strategy="isolated", reporters=[])
    return {
        "strategies": [result.strategy for result in results],
        "scores": {result.name: result.value["score"].tolist() for result in results},
        "expected": {name: rows[name].sum(1).tolist() for name in widths},
    }


if __name__ == "__main__":
    print(main())
