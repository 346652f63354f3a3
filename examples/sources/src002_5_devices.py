"""A GPU for each process, chosen before TensorFlow is imported there; what the processes computed comes back in order."""

from functools import partial

import carpool

GPUS = ("0", "1")


def train_on(gpu, rate):
    """Runs in a fresh process, where nothing has looked for GPUs yet; `limit_memory` raises where something has."""
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    carpool.limit_memory("auto")

    import tensorflow as tf

    class Point(tf.Module):
        def __init__(self):
            super().__init__()
            self.at = tf.Variable(tf.constant(5.0))

    def step(model, batch):
        return tf.reduce_mean((model.at - batch) ** 2)

    descent = partial(tf.compat.v1.train.GradientDescentOptimizer, rate)
    job = carpool.Job(Point, tf.ones((64,)), step=step, optimizer=descent, epochs=5)
    [result] = carpool.train([job], reporters=[])
    return {
        "gpu": gpu,
        "process": os.getpid(),
        "at": float(result.model.at),
        "loss": list(result.history["loss"]),
    }


def main():
    configs = [{"gpu": gpu, "rate": rate} for gpu, rate in zip(GPUS, (0.1, 0.3), strict=True)]
    results = carpool.map(
        train_on, configs, workers=len(GPUS)
    )  # as many processes as GPUs: none is used twice
    for result in results.failed:
        raise RuntimeError(f"{result.name} failed") from result.error
    return [result.value for result in results]


if __name__ == "__main__":
    print(main())
