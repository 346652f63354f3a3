"""Two Keras models of different width trained at once in one process; each ends where it ends alone, and its loss is returned."""

import keras
import numpy as np

import carpool

x = np.random.default_rng(0).normal(size=(320, 10)).astype("float32")
y = x[:, :1] - x[:, 1:2]


def regressor(units):
    keras.utils.set_random_seed(units)  # in the one thread that builds; training draws nothing from it
    hidden = keras.layers.Dense(units, activation="relu")
    model = keras.Sequential([keras.Input((10,)), hidden, keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    return model


def main():
    together = {"narrow": regressor(16), "broad": regressor(48)}
    results = carpool.fit(together, x, y, epochs=4, reporters=[])
    alone = regressor(48)
    carpool.fit([alone], x, y, epochs=4, reporters=[])
    pairs = zip(together["broad"].get_weights(), alone.get_weights(), strict=True)
    return {
        "losses": {result.name: list(result.history["loss"]) for result in results},
        "evaluated": {name: model.evaluate(x, y, verbose=0) for name, model in together.items()},  # type: ignore
        "same": all(np.array_equal(one, other) for one, other in pairs),
    }


if __name__ == "__main__":
    print(main())
