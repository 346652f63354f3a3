"""Plain TensorFlow modules, no Keras models: a sweep of learning rates on arrays beside one that reads a tf.data.Dataset."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # for its optimizers

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import carpool

images, labels = load_digits(return_X_y=True)
x, y = np.asarray(images / 16, "float32"), np.asarray(labels, "int32")
train, held = (x[:1408], y[:1408]), (x[1408:], y[1408:])


class Net(tf.Module):
    def __init__(self, hidden, seed):
        super().__init__()
        drawn = tf.random.Generator.from_seed(seed)  # no global seed is touched
        self.w1, self.b1 = tf.Variable(drawn.normal((64, hidden)) / 8), tf.Variable(tf.zeros(hidden))
        self.w2, self.b2 = tf.Variable(drawn.normal((hidden, 10)) / 6), tf.Variable(tf.zeros(10))

    def __call__(self, x):
        return tf.nn.relu(x @ self.w1 + self.b1) @ self.w2 + self.b2


def step(model, batch):
    logits = model(batch[0])
    right = tf.reduce_mean(tf.cast(tf.argmax(logits, 1, tf.int32) == batch[1], tf.float32))
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch[1], logits=logits)
    return {"loss": tf.reduce_mean(loss), "right": right}


def job(data, rate, hidden=32, **options):
    return carpool.Job(
        lambda seed: Net(hidden, seed), data, step=step, optimizer=lambda: keras.optimizers.Adam(rate), batch_size=64,
        epochs=5, validation_data=held, seed=1, **options,
    )  # fmt: skip


piped = tf.data.Dataset.from_tensor_slices(train).shuffle(1408, seed=0).batch(64).prefetch(2)
jobs = [job(train, rate, name=f"rate={rate}") for rate in (1e-3, 3e-3, 1e-2)]
results = carpool.train([*jobs, job(piped, 3e-3, hidden=48, name="piped")], reporters=[])
print(results.table(sort="val_loss"))
[alone] = carpool.train([job(train, 1e-3, name="alone")], reporters=[])
print(np.array_equal(alone.model.w1, results["rate=0.001"].model.w1), "together as alone, to the bit")
