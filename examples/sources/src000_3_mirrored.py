"""One model over all devices, beside one on a single device: each batch is cut in parts, and both end in the same place."""

import numpy as np
import tensorflow as tf

import carpool

x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
y = x.sum(1, keepdims=True)


class Line(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.zeros((6, 1)))


def step(model, batch):
    return tf.reduce_mean((batch[0] @ model.w - batch[1]) ** 2)


def all_devices():
    """The GPUs; where there are fewer than two, two logical CPUs, which have to be made before TensorFlow starts."""
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def main():
    strategy = all_devices()

    def mirrored():
        with strategy.scope():
            return Line()

    def job(model, name):
        descent = tf.compat.v1.train.GradientDescentOptimizer
        return carpool.Job(model, (x, y), step=step, optimizer=lambda: descent(0.1), epochs=6, name=name)

    results = carpool.train([job(mirrored, "all"), job(Line, "one")], reporters=[])
    apart = float(np.abs(results["all"].model.w.numpy() - results["one"].model.w.numpy()).max())
    losses = list(results["all"].history["loss"])
    return {"devices": strategy.num_replicas_in_sync, "apart": apart, "loss": losses}


if __name__ == "__main__":
    print(main())
