"""A model in two parts, each with variables and a device of its own, trained as one job beside the same model on one device."""

import numpy as np
import tensorflow as tf

import carpool
from carpool.tensorflow import Graph

v1 = tf.compat.v1
random = np.random.default_rng(0)
pixels = random.normal(size=(160, 12)).astype("float32")
data = {"pixels": pixels, "label": (pixels.sum(1) > 0).astype("int32")}


def network(first, second):
    """Builds the lower part on one device and the upper part on another; TensorFlow carries what passes between them."""

    def build():
        x = v1.placeholder(tf.float32, [None, 12], name="pixels")
        y = v1.placeholder(tf.int32, [None], name="label")
        with v1.variable_scope("lower"), v1.device(first):
            seen = tf.nn.tanh(x @ v1.get_variable("w", [12, 16]))
        with v1.variable_scope("upper"), v1.device(second):
            said = seen @ v1.get_variable("w", [16, 2])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=said))
        return {"loss": loss, "step": v1.train.AdamOptimizer(0.05).minimize(loss)}

    return build


def job(name, *parts):
    """With two GPUs the parts are "/gpu:0" and "/gpu:1", and there is nothing to configure."""
    config = v1.ConfigProto(device_count={"CPU": 2})
    graph = Graph(network(*parts), ["loss"], train_op="step", config=config)
    return carpool.Job(graph, data, epochs=5, name=name)


def main():
    jobs = [job("two devices", "/cpu:0", "/cpu:1"), job("one device", "/cpu:0", "/cpu:0")]
    results = carpool.train(jobs, device="cpu", reporters=[])
    weights = [result.model.variables for result in results]
    return {
        "loss": list(results["two devices"].history["loss"]),
        "parts": sorted(name for name in weights[0] if name.endswith("/w")),
        "same": all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0]),
    }


if __name__ == "__main__":
    print(main())
