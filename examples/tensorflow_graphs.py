"""Three TensorFlow 1 graphs trained side by side, each in a session of its own; then two of them in a loop of one's own."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import carpool
from carpool.tensorflow import Graph, sessions

v1 = tf.compat.v1
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
train, test = {"x": images[:1500], "y": labels[:1500]}, {"x": images[1500:], "y": labels[1500:]}


def network(hidden, rate):
    """Builds into the graph that it is called in, and names what matters."""

    def build():
        x = v1.placeholder(tf.float32, [None, 64], name="x")
        y = v1.placeholder(tf.int32, [None], name="y")
        kept = v1.placeholder_with_default(1.0, [], name="kept")
        inner = tf.nn.relu(x @ v1.get_variable("in", [64, hidden]) + v1.get_variable("bias", [hidden]))
        read = tf.nn.dropout(inner, rate=1 - kept) @ v1.get_variable("out", [hidden, 10])
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=read))
        right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(read, 1, tf.int32), y), tf.float32))
        step = v1.train.AdamOptimizer(rate).minimize(loss)
        return {"x": x, "y": y, "kept": kept, "read": read, "loss": loss, "accuracy": right, "step": step}

    return build


def job(hidden, rate):
    graph = Graph(
        network(hidden, rate),
        fetches=["loss", "accuracy"],
        train_op="step",
        feeds={"kept": 0.8},
        validation_feeds={"kept": 1.0},
    )
    return carpool.Job(graph, train, validation_data=test, epochs=8, name=f"{hidden} wide")


results = carpool.train([job(16, 0.01), job(32, 0.01), job(64, 0.003)], device="cpu", reporters=[])
print(results.table(sort="val_loss"))

with sessions({"best": results.best("val_accuracy").model, "fresh": network(32, 0.01)}) as opened:
    asked = {name: opened[name].run_async("accuracy", test) for name in opened}
    print({name: f"{future.result():.2f} of unseen digits read rightly" for name, future in asked.items()})
