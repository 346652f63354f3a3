"""Two graphs, each with a session and a thread of its own: futures by name; one graph asked for twice is copied, not shared."""

import tensorflow as tf

from carpool.tensorflow import sessions

v1 = tf.compat.v1


def area():
    return {"answer": tf.constant(4.0) * tf.constant(2.5)}


def counter():
    """A graph that counts how often it was run."""
    with tf.Graph().as_default() as graph:
        seen = v1.get_variable("seen", [], initializer=v1.zeros_initializer())
        tf.identity(v1.assign_add(seen, 1.0), name="answer")
    return graph


def main():
    graph = counter()
    with sessions({"area": area, "count": graph, "count again": graph}) as opened:
        asked = {name: opened[name].run_async("answer") for name in opened}
        for _ in range(4):
            asked["count"] = opened["count"].run_async("answer")
        return {name: float(future.result()) for name, future in asked.items()}


if __name__ == "__main__":
    print(main())
