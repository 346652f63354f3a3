"""GPU memory said in one way: for the whole process, for each of several sessions, for one job; the plan lists the caps."""

import os

import carpool


def main():
    carpool.limit_memory("40%")  # of each GPU, for torch, JAX and TensorFlow: before they are imported

    import tensorflow as tf

    from carpool.tensorflow import Graph, caps, sessions

    def build():
        return {"two": tf.constant(1.0) + 1.0}

    class Bias(tf.Module):
        def __init__(self):
            super().__init__()
            self.b = tf.Variable(tf.zeros(()))

    with sessions({"a": build, "b": build}, memory={"a": "2GiB", "b": "25%"}) as opened:
        told, both = opened.caps, [float(opened[name].run("two")) for name in opened]
    graph = Graph(build, ["two"], steps=3).job(budget="1GiB", name="graph")
    module = carpool.Job(
        Bias, tf.ones((8,)), step=lambda model, batch: tf.reduce_mean((model.b - batch) ** 2), budget="3GiB",
        optimizer=lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1), name="module",
    )  # fmt: skip
    return {
        "process": os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"],
        "gpus": [str(cap) for cap in caps()],
        "sessions": told,
        "values": both,
        "plan": carpool.plan([graph, module], strategy="isolated").explain(),
    }


if __name__ == "__main__":
    print(main())
