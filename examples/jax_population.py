"""Population-based training in JAX: every ten steps the worst rates go on from the best models, with rates near theirs."""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import carpool.jax

images, labels = load_digits(return_X_y=True)
x, y = (images / 16).astype("float32"), labels.astype("int32")
drawn = np.random.default_rng(0)


def applied(parameters, x):
    return jax.nn.relu(x @ parameters["w"]) @ parameters["v"]


def init(key):
    w, v = jax.random.normal(key, (64, 32)) / 8, jax.random.normal(jax.random.fold_in(key, 1), (32, 10)) / 6
    return carpool.jax.Model({"w": w, "v": v}, applied)


def step(model, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


rates = np.logspace(-5, 0, 16)
pop = carpool.jax.population(init, step, lambda lr: optax.adam(lr), keys=16, hyper={"lr": rates})
for _ in range(12):
    chosen = drawn.integers(0, 1400, (10, 64))
    losses = pop.steps((x[chosen], y[chosen]))["loss"]  # ten steps in one launch, (10, 16)
    order = losses[-5:].mean(0).argsort()
    best, worst = order[:4], order[-4:]
    pop.copy(best, worst)
    rates = pop.hyper["lr"]
    pop.hyper["lr"] = rates.at[worst].set(rates[best] * drawn.choice([0.8, 1.25], 4))

accuracy = (pop.predict(x[1400:]).argmax(-1) == y[1400:]).mean(-1)
print(f"accuracy of one: {accuracy.min():.3f} to {accuracy.max():.3f}")
pop.drop(accuracy.argsort()[:8])
votes = jax.nn.softmax(pop.predict(x[1400:])).mean(0)
print(f"of the better {len(pop)} together: {(votes.argmax(-1) == y[1400:]).mean():.3f}")
