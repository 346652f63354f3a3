"""Thirty-two JAX models, four learning rates and eight seeds, from one compile: plain functions and plain optax."""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import carpool
from carpool.jax import Model

images, labels = load_digits(return_X_y=True)
x, y = (images / 16).astype(np.float32), labels.astype(np.int32)


def init(key):
    first, second = jax.random.split(key)
    weights = {"in": jax.random.normal(first, (64, 32)) / 8, "out": jax.random.normal(second, (32, 10)) / 6}
    return Model(weights, lambda w, x: jax.nn.relu(x @ w["in"]) @ w["out"])


def loss(prediction, target):
    return optax.softmax_cross_entropy_with_integer_labels(prediction, target).mean()


def job(lr, seed):
    return carpool.Job(
        init,
        (x[:1408], y[:1408]),
        validation_data=(x[1408:], y[1408:]),
        loss=loss,
        optimizer=optax.adam(optax.cosine_decay_schedule(lr, 110)),
        batch_size=64,
        epochs=5,
        seed=seed,
    )


results = carpool.train(carpool.grid(job, lr=[1e-4, 1e-3, 1e-2, 1e-1], seed=range(8)), reporters=[])
print(results.table(sort="val_loss", top=3))
model = results.best("val_loss").model  # a Model: its parameters, and apply
print((model(x[1408:]).argmax(-1) == y[1408:]).mean())
