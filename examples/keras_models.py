"""Three different Keras models with three datasets, fitted together: what `model.fit` takes, for all of them in one call."""

import keras
import numpy as np
from keras import layers

import carpool

SHAPES = {"small": (1000, 32, 10), "wide": (800, 64, 5), "narrow": (1200, 16, 2)}  # samples, inputs, classes


def build(inputs, classes):
    model = keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(2 * inputs, activation="relu"), layers.Dense(classes)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss, metrics=["accuracy"])
    return model


random = np.random.default_rng(0)
models = {name: build(inputs, classes) for name, (_, inputs, classes) in SHAPES.items()}
x = {name: random.normal(size=(samples, inputs)) for name, (samples, inputs, _) in SHAPES.items()}
y = {name: random.integers(0, classes, samples) for name, (samples, _, classes) in SHAPES.items()}

results = carpool.fit(models, x=carpool.each(**x), y=carpool.each(**y), epochs=5, validation_split=0.2)
for result in results:
    loss, accuracy = models[result.name].evaluate(x[result.name], y[result.name], verbose=0)  # type: ignore
    print(
        f"{result.name:8} val_loss {result.history['val_loss'][-1]:.3f}, evaluated again on all: {loss:.3f}"
    )
