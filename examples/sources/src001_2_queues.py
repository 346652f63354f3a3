"""Two queues in one session, each filled by a thread of its own; the threads end when the input does, or when the job does."""

import threading

import numpy as np
import tensorflow as tf

import carpool
from carpool.tensorflow import Graph

v1 = tf.compat.v1


def queue(values, width):
    """A queue of vectors that a runner fills from `values`, once through them."""
    one = v1.train.input_producer(values, num_epochs=1, shuffle=False).dequeue()
    waiting = v1.FIFOQueue(8, [tf.float32], shapes=[[width]])
    v1.train.add_queue_runner(v1.train.QueueRunner(waiting, [waiting.enqueue(one)]))
    return waiting


def main():
    sounds, lights = np.ones((12, 5), "float32"), np.full((12, 3), 2.0, "float32")
    sounds *= np.arange(12)[:, None]

    def build():
        heard, seen = queue(sounds, 5).dequeue(), queue(lights, 3).dequeue()
        return {"heard": tf.reduce_sum(heard), "seen": tf.reduce_sum(seen)}

    before = threading.active_count()
    whole = Graph(build, ["heard", "seen"]).job(name="until the input ends")
    part = Graph(build, ["heard", "seen"], steps=5).job(name="five steps")
    results = carpool.train([whole, part], device="cpu", reporters=[])
    return {
        "heard": [float(one) for one in results["until the input ends"].value["heard"]],
        "seen": [float(one) for one in results["until the input ends"].value["seen"]],
        "five": len(results["five steps"].value["heard"]),
        "threads left": threading.active_count() - before,
    }


if __name__ == "__main__":
    print(main())
