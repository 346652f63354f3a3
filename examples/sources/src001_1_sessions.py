"""Two sessions that hold large matrices, open and at work at the same time, with a cap on the GPU memory of each."""

import tensorflow as tf

from carpool.tensorflow import sessions

v1 = tf.compat.v1
SIZE = 256


def power(seed):
    """A graph with two large variables; each run squeezes one through the other."""

    def build():
        drawn = v1.random_uniform_initializer(0, 2 / SIZE, seed=seed)
        left = v1.get_variable("left", [SIZE, SIZE], initializer=drawn)
        right = v1.get_variable("right", [SIZE, SIZE], initializer=v1.initializers.identity())
        return {"turn": v1.assign(right, right @ left), "mean": tf.reduce_mean(right)}

    return build


def work(opened, names):
    for _ in range(3):
        for name in names:
            opened[name].run_async("turn")  # nobody waits for anybody; one session's runs keep their order
    asked = {name: opened[name].run_async("mean") for name in names}
    return {name: float(future.result()) for name, future in asked.items()}


def main():
    graphs = {"first": power(1), "second": power(2)}
    with sessions(graphs, memory={"first": "2GiB", "second": "1GiB"}) as opened:
        together, caps = work(opened, ["first", "second"]), opened.caps
    alone = {}
    for name, graph in graphs.items():
        with sessions({name: graph}) as opened:
            alone |= work(opened, [name])
    return {"together": together, "alone": alone, "caps": caps}


if __name__ == "__main__":
    print(main())
