"""Keras models of several sizes, each in a process of its own; your own models hold the trained weights afterwards."""

import keras
import numpy as np

import carpool

SIZES = {"small": 8, "medium": 16, "large": 32}
x = np.random.default_rng(0).normal(size=(256, 10)).astype("float32")
y = x.sum(1, keepdims=True)


def regressor(units):
    keras.utils.set_random_seed(units)
    hidden = keras.layers.Dense(units, activation="relu")
    model = keras.Sequential([keras.Input((10,)), hidden, keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


def errors(models):
    return {name: model.evaluate(x, y, verbose=0) for name, model in models.items()}


def main():
    models = {name: regressor(units) for name, units in SIZES.items()}
    before = errors(models)
    epochs = carpool.each(small=2, medium=4, large=6)
    results = carpool.fit(models, x, y, epochs=epochs, strategy="isolated", reporters=[])
    return {
        "strategies": [result.strategy for result in results],
        "epochs": {result.name: len(result.history["loss"]) for result in results},
        "before": before,
        "after": errors(models),
    }


if __name__ == "__main__":
    print(main())
