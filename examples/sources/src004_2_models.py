"""Three Keras models, each with its own optimizer, loss and data, fitted in one call; the plan says who runs how, and why."""

import keras
import numpy as np

import carpool

SHAPES = {"a": (160, 12, 6), "b": (128, 20, 4), "c": (192, 8, 2)}  # samples, inputs, classes
RATES = {"a": 1e-2, "b": 5e-3, "c": 2e-2}


def classifier(inputs, classes, rate):
    hidden = keras.layers.Dense(2 * inputs, activation="relu")
    model = keras.Sequential(
        [keras.Input((inputs,)), hidden, keras.layers.Dense(classes, activation="softmax")]
    )
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=keras.losses.SparseCategoricalCrossentropy())
    return model


def main():
    keras.utils.set_random_seed(5)
    random = np.random.default_rng(0)
    x = {name: random.normal(size=shape[:2]).astype("float32") for name, shape in SHAPES.items()}
    y = {name: x[name][:, : shape[2]].argmax(1) for name, shape in SHAPES.items()}
    models = {name: classifier(*shape[1:], RATES[name]) for name, shape in SHAPES.items()}
    jobs = [carpool.Job(models[name], (x[name], y[name]), name=name, epochs=4) for name in models]
    plan = carpool.plan(jobs).explain()
    results = carpool.train(jobs, reporters=[])
    return {
        "plan": plan,
        "losses": {result.name: list(result.history["loss"]) for result in results},
        "rates": {name: float(model.optimizer.learning_rate.numpy()) for name, model in models.items()},
    }


if __name__ == "__main__":
    print(main())
