"""Two models in one graph, run at the same time from threads of one session: results by name, and an error is an error."""

import numpy as np
import tensorflow as tf

from carpool.errors import ModelError
from carpool.tensorflow import run

v1 = tf.compat.v1


def both():
    with tf.Graph().as_default() as graph:
        short = v1.placeholder(tf.float32, [None, 4], name="short")
        long = v1.placeholder(tf.float32, [None, 9], name="long")
        fetches = {"mean": tf.reduce_mean(short, 1), "norm": tf.norm(long, axis=1)}
    return graph, fetches


def main():
    graph, fetches = both()
    short, long = np.full((2, 4), 3.0, "float32"), np.full((2, 9), 2.0, "float32")
    feeds = {"mean": {"short": short}, "norm": {"long": long}}
    made = run(graph, fetches, feeds=feeds)
    try:
        run(graph, fetches, feeds={"mean": {"shrot": short}, "norm": {"long": long}})
        misspelt = "passed unnoticed"
    except ModelError as error:
        misspelt = str(error)
    return {"mean": made["mean"].tolist(), "norm": made["norm"].tolist(), "misspelt": misspelt}


if __name__ == "__main__":
    print(main())
