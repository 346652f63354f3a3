"""One train step, written once as a tf.function, for three different models: each job traces it for itself, and none waits for another."""

import keras
import numpy as np
import tensorflow as tf

import carpool

SHAPES = {"a": (192, 12, 6), "b": (128, 20, 4), "c": (256, 8, 2)}  # samples, inputs, classes
RATES = {"a": 1e-2, "b": 5e-3, "c": 2e-2}


class Net(tf.Module):
    def __init__(self, inputs, classes, seed):
        super().__init__()
        drawn = tf.random.Generator.from_seed(seed)  # no global seed is touched
        self.inner = tf.Variable(drawn.normal((inputs, 2 * inputs)) * 0.2)
        self.outer = tf.Variable(drawn.normal((2 * inputs, classes)) * 0.2)

    def __call__(self, x):
        return tf.nn.relu(x @ self.inner) @ self.outer


@tf.function
def step(model, batch):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch[1], logits=model(batch[0]))
    return {"loss": tf.reduce_mean(losses), "worst": tf.reduce_max(losses)}


def job(name):
    samples, inputs, classes = SHAPES[name]
    x = np.random.default_rng(inputs).normal(size=(samples, inputs)).astype("float32")
    y = x[:, :classes].argmax(1).astype("int32")
    return carpool.Job(
        lambda seed: Net(inputs, classes, seed), (x, y), step=step, epochs=5, seed=1, name=name,
        optimizer=lambda: keras.optimizers.Adam(RATES[name]),
    )  # fmt: skip


def main():
    results = carpool.train([job(name) for name in SHAPES], reporters=[])
    [alone] = carpool.train([job("b")], reporters=[])
    pairs = zip(results["b"].model.variables, alone.model.variables, strict=True)
    same = all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs)
    return {"losses": {result.name: list(result.history["loss"]) for result in results}, "same": same}


if __name__ == "__main__":
    print(main())
