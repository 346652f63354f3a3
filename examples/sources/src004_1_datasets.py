"""Three pipelines of different shape, each read ahead and inside its job's own loop, from the beginning in every epoch."""

import numpy as np
import tensorflow as tf

import carpool

SHAPES = {"a": (200, 12, 6), "b": (150, 20, 4), "c": (230, 8, 2)}  # samples, inputs, classes


def pipeline(samples, inputs, classes):
    random = np.random.default_rng(inputs)
    x = random.normal(size=(samples, inputs)).astype("float32")
    y = x[:, :classes].argmax(1).astype("int32")
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(samples, seed=1).batch(32)


class Linear(tf.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.w = tf.Variable(tf.zeros((inputs, classes)))

    def __call__(self, x):
        return x @ self.w


def loss(said, wanted):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=wanted, logits=said))


def job(name, samples, inputs, classes):
    return carpool.Job(
        lambda: Linear(inputs, classes), pipeline(samples, inputs, classes), loss=loss, epochs=4, name=name,
        optimizer=lambda: tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), prefetch=4,
    )  # fmt: skip


def main():
    results = carpool.train([job(name, *shape) for name, shape in SHAPES.items()], reporters=[])
    return {result.name: {"steps": result.steps, "loss": list(result.history["loss"])} for result in results}


if __name__ == "__main__":
    print(main())
