"""Keras on torch: a fit by traced steps ends where `model.fit` ends, and a job in a stack where it ends alone."""

from __future__ import annotations

import os
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import carpool
from carpool.adapters.keras import train
from carpool.adapters.keras.own import OwnFit

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason=f"KERAS_BACKEND is {os.environ.get('KERAS_BACKEND')}"
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(44, 6)).astype("float32")
Y = RNG.integers(0, 3, 44).astype("int32")
SEQUENCES = RNG.normal(size=(44, 5, 4)).astype("float32")
IMAGES = RNG.normal(size=(44, 8, 8, 2)).astype("float32")
TOKENS = RNG.integers(0, 11, (44, 5)).astype("int32")
EPOCHS = 2
OPTIONS: dict[str, Any] = {"epochs": EPOCHS, "batch_size": 8, "shuffle": False, "reporters": []}


def compiled(inputs: Any, *middle: Any, optimizer: Any = None, seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    parts = [keras.Input(inputs[0].shape if not isinstance(inputs, tuple) else inputs)]
    model = keras.Sequential([*parts, *(make() for make in middle), layers.Dense(3, activation="softmax")])
    model.compile(
        optimizer=optimizer() if optimizer else keras.optimizers.Adam(1e-2),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def dense(seed: int = 0, optimizer: Any = None, *more: Any) -> Any:
    return compiled((6,), lambda: layers.Dense(8, activation="relu"), *more, optimizer=optimizer, seed=seed)


def attending(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    given = keras.Input((5, 4))
    seen = layers.MultiHeadAttention(2, 4)(given, given)
    made = layers.Dense(3, activation="softmax")(layers.Flatten()(layers.LayerNormalization()(seen + given)))
    model = keras.Model(given, made)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def token_model(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(11, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="rmsprop", loss=loss, metrics=["accuracy"])
    return model


def bfloat(seed: int = 0) -> Any:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return dense(seed)
    finally:
        keras.config.set_dtype_policy(before)


MODELS = {
    "dense": (dense, X),
    "batchnorm": (lambda seed=0: dense(seed, None, layers.BatchNormalization), X),
    "layernorm": (lambda seed=0: dense(seed, None, layers.LayerNormalization), X),
    "regularized": (
        lambda seed=0: dense(
            seed, None, lambda: layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1")
        ),
        X,
    ),
    "lstm": (lambda seed=0: compiled((5, 4), lambda: layers.LSTM(6), seed=seed), SEQUENCES),
    "gru": (lambda seed=0: compiled((5, 4), lambda: layers.GRU(6), seed=seed), SEQUENCES),
    "bidirectional": (
        lambda seed=0: compiled((5, 4), lambda: layers.Bidirectional(layers.LSTM(3)), seed=seed),
        SEQUENCES,
    ),
    "attention": (attending, SEQUENCES),
    "conv1d": (
        lambda seed=0: compiled(
            (5, 4), lambda: layers.Conv1D(6, 3, activation="relu"), layers.Flatten, seed=seed
        ),
        SEQUENCES,
    ),
    "conv2d": (
        lambda seed=0: compiled(
            (8, 8, 2),
            lambda: layers.Conv2D(4, 3, padding="same", use_bias=False),
            layers.BatchNormalization,
            layers.MaxPooling2D,
            layers.Flatten,
            seed=seed,
        ),
        IMAGES,
    ),
    "separable": (
        lambda seed=0: compiled(
            (8, 8, 2), lambda: layers.SeparableConv2D(4, 3), layers.GlobalAveragePooling2D, seed=seed
        ),
        IMAGES,
    ),
    "embedding": (token_model, TOKENS),
    "bfloat16": (bfloat, X),
}

optimizers: Any = keras.optimizers
schedules: Any = keras.optimizers.schedules
OPTIMIZERS = {
    name: (lambda make=make: make())
    for name, make in {
        "sgd": lambda: optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
        "rmsprop": lambda: optimizers.RMSprop(1e-2, momentum=0.5, centered=True),
        "adam": lambda: optimizers.Adam(1e-2, amsgrad=True),
        "adamw": lambda: optimizers.AdamW(1e-2, weight_decay=0.1),
        "adadelta": lambda: optimizers.Adadelta(0.5),
        "adagrad": lambda: optimizers.Adagrad(1e-2),
        "adamax": lambda: optimizers.Adamax(1e-2),
        "nadam": lambda: optimizers.Nadam(1e-2),
        "ftrl": lambda: optimizers.Ftrl(1e-1),
        "lion": lambda: optimizers.Lion(1e-3),
        "lamb": lambda: optimizers.Lamb(1e-2),
        "adafactor": lambda: optimizers.Adafactor(1e-2),
        "muon": lambda: optimizers.Muon(1e-2),
        "clipnorm": lambda: optimizers.SGD(1e-1, clipnorm=0.1),
        "clipvalue": lambda: optimizers.SGD(1e-1, clipvalue=0.01),
        "global_clipnorm": lambda: optimizers.Adam(1e-1, global_clipnorm=0.1),
        "cosine": lambda: optimizers.SGD(schedules.CosineDecay(0.1, 5, warmup_target=0.2, warmup_steps=3)),
        "restarts": lambda: optimizers.SGD(schedules.CosineDecayRestarts(0.1, 2)),
        "exponential": lambda: optimizers.Adam(schedules.ExponentialDecay(0.1, 3, 0.5)),
        "piecewise": lambda: optimizers.SGD(schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01])),
        "polynomial": lambda: optimizers.SGD(schedules.PolynomialDecay(0.1, 3, cycle=True)),
        "ema": lambda: optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=3),
        "accumulate": lambda: optimizers.Adam(1e-2, gradient_accumulation_steps=3),
        "decay": lambda: optimizers.SGD(1e-2, weight_decay=0.1),
        "decay, warming up": lambda: optimizers.AdamW(
            schedules.CosineDecay(0.1, 5, warmup_target=0.2, warmup_steps=3), weight_decay=0.1
        ),
        "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(1e-2), dynamic_growth_steps=3),
    }.items()
}


@pytest.fixture(autouse=True)
def whole_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU convolutions round to TF32 unless they are told not to."""
    monkeypatch.setattr("torch.backends.cudnn.allow_tf32", False)


@pytest.fixture(autouse=True)
def no_own_fit(monkeypatch):
    """Nothing here may quietly train by the model's own `fit`."""

    def refused(fit: Any) -> None:
        raise AssertionError(f"it trains by its own fit: {fit.own}")

    monkeypatch.setattr(train, "OwnFit", refused)


def fitted(model: Any, x: Any, **options: Any) -> dict[str, list[float]]:
    return model.fit(x, Y, epochs=EPOCHS, batch_size=8, shuffle=False, verbose=0, **options).history


def assert_equal(ours: Any, theirs: Any, rtol: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=rtol, atol=1e-7, err_msg=name)


def assert_same_variables(ours: Any, theirs: Any, rtol: float = 1e-4) -> None:
    for one, other in zip(
        [*ours.variables, *ours.optimizer.variables],
        [*theirs.variables, *theirs.optimizer.variables],
        strict=True,
    ):
        if any(word in other.path for word in ("key/bias", "key_bias")):
            continue  # softmax takes no notice of it: its gradient is rounding, and Adam's step as large as any
        found, expected = (np.asarray(keras.ops.convert_to_numpy(v), "float64") for v in (one, other))
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-6, err_msg=other.path)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_alone_and_in_a_stack_ends_where_its_own_fit_ends(name):
    make, x = MODELS[name]
    loose = 2e-2 if name == "bfloat16" else 1e-5
    own = {str(seed): make(seed) for seed in range(3)}
    expected = {seed: fitted(model, x) for seed, model in own.items()}
    alone = make(0)
    result = carpool.fit({"0": alone}, x, Y, **OPTIONS)
    assert result["0"].reason == "no other job has its structure"
    assert_equal(result["0"].history, expected["0"], loose)
    together = {str(seed): make(seed) for seed in range(3)}
    results = carpool.fit(together, x, Y, **OPTIONS)
    for seed in together:
        assert results[seed].strategy == "fused", results[seed].reason
        assert_equal(results[seed].history, expected[seed], loose)
        if name != "bfloat16":
            assert_same_variables(together[seed], own[seed])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_ends_where_its_own_fit_ends(name):
    own = {str(seed): dense(seed, OPTIMIZERS[name]) for seed in range(2)}
    expected = {seed: fitted(model, X) for seed, model in own.items()}
    alone = dense(0, OPTIMIZERS[name])
    result = carpool.fit({"0": alone}, X, Y, **OPTIONS)
    assert result["0"].reason == "no other job has its structure"
    assert_equal(result["0"].history, expected["0"])
    assert_same_variables(alone, own["0"])
    together = {str(seed): dense(seed, OPTIMIZERS[name]) for seed in range(2)}
    results = carpool.fit(together, X, Y, **OPTIONS)
    for seed in together:
        assert results[seed].strategy == "fused", results[seed].reason
        assert_equal(results[seed].history, expected[seed])
        assert_same_variables(together[seed], own[seed])


def test_a_bias_that_batchnorm_takes_no_notice_of_keeps_no_stack_from_running():
    def make(seed: int) -> Any:
        parts = (lambda: layers.Conv2D(4, 3), layers.BatchNormalization, layers.Flatten)
        return compiled((8, 8, 2), *parts, seed=seed)

    expected = {str(seed): fitted(make(seed), IMAGES) for seed in range(2)}
    results = carpool.fit({str(seed): make(seed) for seed in range(2)}, IMAGES, Y, **OPTIONS)
    for seed, history in expected.items():
        assert results[seed].strategy == "fused", results[seed].reason
        assert_equal(results[seed].history, history)


# The three models that differ


def test_three_different_models_end_where_their_own_fits_end():
    def make(shape: int, hidden: int, classes: int, rate: float) -> Any:
        keras.utils.set_random_seed(0)
        parts = [layers.Dense(hidden, activation="relu"), layers.Dense(classes, activation="softmax")]
        model = keras.Sequential([keras.Input((shape,)), *parts])
        loss = "sparse_categorical_crossentropy"
        model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss, metrics=["accuracy"])
        return model

    sizes = {"a": (32, 64, 10, 1e-3), "b": (64, 128, 5, 5e-4), "c": (16, 32, 2, 2e-3)}
    x = {name: RNG.normal(size=(100, size[0])).astype("float32") for name, size in sizes.items()}
    y = {name: RNG.integers(0, size[2], 100).astype("int32") for name, size in sizes.items()}
    own = {name: make(*size) for name, size in sizes.items()}
    options: dict[str, Any] = {"epochs": 5, "shuffle": False}
    expected = {name: own[name].fit(x[name], y[name], verbose=0, **options).history for name in sizes}
    models = {name: make(*size) for name, size in sizes.items()}
    results = carpool.fit(models, carpool.each(**x), carpool.each(**y), reporters=[], **options)
    for name in sizes:
        assert_equal(results[name].history, expected[name])
        assert_same_variables(models[name], own[name])
        np.testing.assert_allclose(
            models[name].predict(x[name], verbose=0), own[name].predict(x[name], verbose=0), rtol=1e-5
        )


def test_learning_rates_of_their_own_fuse():
    def make(rate: float) -> Any:
        return dense(0, lambda: keras.optimizers.Adam(rate))

    rates = (1e-3, 1e-2, 3e-2)
    expected = {str(rate): fitted(make(rate), X) for rate in rates}
    results = carpool.fit({str(rate): make(rate) for rate in rates}, X, Y, **OPTIONS)
    for rate, history in expected.items():
        assert results[rate].strategy == "fused", results[rate].reason
        assert_equal(results[rate].history, history)


# Random numbers and orders


def dropping(seed: int, layer_seed: int | None) -> Any:
    """A dropout layer with a seed, and with none: Keras takes another way for each."""
    parts = (lambda: layers.Dropout(0.5, seed=layer_seed), lambda: layers.GaussianNoise(0.1))
    return dense(seed, None, *parts)


@pytest.mark.parametrize("layer_seed", [None, 7])
def test_dropout_and_shuffling_are_the_same_alone_in_a_group_and_in_any_order(layer_seed):
    options: dict[str, Any] = {**OPTIONS, "shuffle": True}
    names = [str(seed) for seed in range(4)]

    def seeds(some: Any) -> Any:
        return carpool.each(**{name: int(name) + 10 for name in some})

    alone, models = {}, {}
    for name in names:
        models[name] = dropping(int(name), layer_seed)
        alone[name] = carpool.fit({name: models[name]}, X, Y, seed=seeds([name]), **options)[name].history
    for order in (names, names[::-1], names[1:3]):
        group = {name: dropping(int(name), layer_seed) for name in order}
        results = carpool.fit(group, X, Y, seed=seeds(order), **options)
        for name in order:
            assert results[name].strategy == "fused", results[name].reason
            assert_equal(results[name].history, alone[name])
            assert_same_variables(group[name], models[name])


def test_dropout_draws_anew_for_every_job_and_step():
    rates = []
    for seed in (0, 1):
        model = dropping(0, 7)
        result = carpool.fit({"a": model}, X, Y, seed=seed, **OPTIONS)
        rates.append(result["a"].history["loss"])
    assert rates[0] != rates[1]


def test_a_seed_generator_stands_where_fit_would_have_left_it():
    ours, own = dropping(0, 7), dropping(0, 7)
    fitted(own, X)
    carpool.fit({"a": ours}, X, Y, **OPTIONS)
    states = [
        [v.numpy().tolist() for v in model.non_trainable_variables if "seed" in v.path]
        for model in (ours, own)
    ]
    assert states[0] == states[1]
    assert len(states[0]) == 2


# What surrounds the steps


def test_validation_and_callbacks_see_what_they_would_have_seen():
    def run(fit: Any) -> Any:
        callbacks = [
            keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 3),
        ]
        return fit(validation_data=(X[:20], Y[::-1][:20]), callbacks=callbacks)

    def ours(**more: Any) -> Any:
        more["callbacks"] = carpool.each(a=more["callbacks"])
        return carpool.fit({"a": model}, X, Y, **{**OPTIONS, "epochs": 9}, **more)["a"].history

    def theirs(**more: Any) -> Any:
        return own.fit(X, Y, batch_size=8, epochs=9, shuffle=False, verbose=0, **more).history

    model, own = dense(3), dense(3)
    expected = run(theirs)
    assert 1 < len(expected["loss"]) < 9
    assert_equal(run(ours), expected)
    assert_same_variables(model, own)


def test_validation_in_a_stack():
    validation = (X[:21], Y[::-1][:21])
    expected = {str(seed): fitted(dense(seed), X, validation_data=validation) for seed in range(2)}
    models = {str(seed): dense(seed) for seed in range(2)}
    results = carpool.fit(models, X, Y, validation_data=validation, **OPTIONS)
    for seed, history in expected.items():
        assert results[seed].strategy == "fused", results[seed].reason
        assert_equal(results[seed].history, history)


def test_the_optimizer_goes_on_in_a_later_fit():
    ours, own = dense(), dense()
    carpool.fit({"a": ours}, X, Y, **OPTIONS)
    fitted(own, X)
    assert_equal(fitted(ours, X), fitted(own, X))
    assert_same_variables(ours, own)


def test_a_second_fit_traces_nothing(monkeypatch):
    def make() -> dict[str, Any]:
        return {str(seed): dense(seed) for seed in range(2)}

    carpool.fit(make(), X, Y, **OPTIONS)

    def traced(*_: Any, **__: Any) -> None:
        raise AssertionError("a step was traced")

    from carpool.adapters.torch import program

    monkeypatch.setattr(program, "graph_of", traced)
    results = carpool.fit(make(), X, Y, **OPTIONS)
    assert results["0"].strategy == "fused"


def test_a_member_that_ends_early_leaves_the_others_alone():
    epochs = {"0": 1, "1": 3, "2": 2}
    expected = {}
    for name, many in epochs.items():
        own = dense(int(name)).fit(X, Y, batch_size=8, epochs=many, shuffle=False, verbose=0)
        expected[name] = own.history
    models = {name: dense(int(name)) for name in epochs}
    results = carpool.fit(models, X, Y, **{**OPTIONS, "epochs": carpool.each(**epochs)})
    for name in epochs:
        assert results[name].strategy == "fused", results[name].reason
        assert_equal(results[name].history, expected[name])


def test_a_weight_that_the_loss_does_not_reach_stays():
    def make() -> Any:
        keras.utils.set_random_seed(0)
        given = keras.Input((6,))
        used = layers.Dense(3, activation="softmax")
        other = layers.Dense(2)
        model = keras.Model(given, [used(given), other(given)])
        losses = ["sparse_categorical_crossentropy", None]
        model.compile(optimizer=keras.optimizers.AdamW(1e-2, weight_decay=0.5), loss=losses)
        return model

    ours, own = make(), make()
    before = own.get_weights()[2].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras says at each step that there are no gradients
        own.fit(X, (Y, X[:, :2]), batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0)
        carpool.fit({"a": ours}, X, carpool.each(a=(Y, X[:, :2])), **OPTIONS)
    assert_same_variables(ours, own)
    np.testing.assert_array_equal(own.get_weights()[2], before)


def test_tensors_that_are_no_variables_are_each_models_own():
    def make(scale: float) -> Any:
        normalization = layers.Normalization(axis=-1)
        normalization.adapt(X * scale)
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), normalization, layers.Dense(3, activation="softmax")])
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    for scale in (1.0, 5.0):
        assert_equal(carpool.fit({"a": make(scale)}, X, Y, **OPTIONS)["a"].history, fitted(make(scale), X))
    results = carpool.fit({"a": make(1.0), "b": make(5.0)}, X, Y, **OPTIONS)
    assert "Normalization" in str(results["b"].reason)
    assert_equal(results["b"].history, fitted(make(5.0), X))


# What trains by its own fit


class Stepping(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)  # its layers draw the seeds of their weights when they are made
        self.dense = layers.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Branching(layers.Layer):
    def call(self, x: Any) -> Any:
        ops: Any = keras.ops
        return x if bool(ops.sum(x) > 0) else -x


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: with_options(dense(), run_eagerly=True), "run_eagerly=True"),
        (lambda: with_options(Stepping()), "train_step is its own"),
        (lambda: dense(0, None, Branching), "`if`"),
    ],
)
def test_what_no_program_can_run_trains_by_its_own_fit(make, words, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "OwnFit", lambda fit: seen.append(fit.own) or OwnFit(fit))
    result = carpool.fit({"a": make()}, X, Y, **OPTIONS)["a"]
    assert words in seen[0]
    assert_equal(result.history, fitted(make(), X))


def with_options(model: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    if not model.built:
        model(X[:1])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model
