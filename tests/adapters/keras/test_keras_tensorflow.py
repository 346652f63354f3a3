"""Keras on TensorFlow: whatever runs in programs ends where `model.fit` ends."""

import gc
import os
import weakref
from typing import Any

import numpy as np
import pytest

if os.environ.get("KERAS_BACKEND") != "tensorflow":
    pytest.skip("needs KERAS_BACKEND=tensorflow", allow_module_level=True)

import keras
import tensorflow as tf
from keras import layers

import carpool
from carpool.adapters.keras import tensorflow_engine, tensorflow_program
from carpool.adapters.keras.own import OwnFit
from carpool.adapters.keras.tensorflow_engine import TensorFlowEngine

THREE = {"a": (1000, 32, 64, 10, 1e-3), "b": (800, 64, 128, 5, 5e-4), "c": (1200, 16, 32, 2, 2e-3)}
PLAIN = {"shuffle": False, "reporters": []}


@pytest.fixture
def traces(monkeypatch):
    """Every program that is traced."""
    found = []
    real = tensorflow_program.traced
    monkeypatch.setattr(tensorflow_engine, "traced", lambda *a, **k: found.append(real(*a, **k)) or found[-1])
    return found


@pytest.fixture
def only_programs(monkeypatch):
    """A job that ends up in its own `fit` fails."""

    def refuse(self, *_):
        raise AssertionError("trained by its own fit")

    monkeypatch.setattr(OwnFit, "__init__", refuse)


def numbers(samples=70, width=6, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, width)).astype("float32"), rng.integers(0, classes, samples).astype(
        "int32"
    )


def build(middle: Any = list, optimizer=None, seed=0, **compiled) -> Any:
    """`middle` makes the layers: they draw their seeds when they are made."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((6,)), *middle(), layers.Dense(3)])
    compile(model, optimizer, **compiled)
    return model


def hidden():
    return [layers.Dense(8, "relu")]


def compile(model, optimizer=None, **compiled):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"], **compiled)


def state(model):
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def assert_same(ours, theirs, rtol=1e-5, atol=1e-7):
    for a, b in zip(state(ours), state(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_history(result, history, rtol=1e-5):
    assert set(result.history) == set(history)
    for name, values in history.items():
        np.testing.assert_allclose(result.history[name], values, rtol=rtol, err_msg=name)


def compare(make, x, y, jobs=1, epochs=2, beside=None, rtol=1e-5, atol=1e-7, **arguments):
    """Fits `make(seed)` together and, those in `beside`, alone; models, optimizers and histories must be the same."""
    ours = {str(seed): make(seed) for seed in range(jobs)}
    done = carpool.fit(ours, x=x, y=y, epochs=epochs, batch_size=16, **PLAIN, **arguments)
    for seed in range(jobs) if beside is None else beside:
        alone = make(seed)
        shown = alone.fit(x, y, epochs=epochs, batch_size=16, shuffle=False, verbose=0, **arguments)
        assert done[str(seed)].outcome is carpool.Outcome.COMPLETED, done[str(seed)].error
        assert_history(done[str(seed)], shown.history, rtol)
        assert_same(ours[str(seed)], alone, rtol, atol)
    return done


def three(name) -> tuple[Any, Any, Any]:
    samples, width, hidden, classes, rate = THREE[name]
    x, y = numbers(samples, width, classes)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((width,)),
            layers.Dense(hidden, activation="relu"),
            layers.Dense(classes, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, x, y


@pytest.mark.slow
@pytest.mark.parametrize("order", ["abc", pytest.param("cba", marks=pytest.mark.slow)])
def test_three_different_models_end_as_each_alone(only_programs, order):
    made = {name: three(name) for name in order}
    done = carpool.fit(
        {name: model for name, (model, _, _) in made.items()},
        x=carpool.each(**{name: x for name, (_, x, _) in made.items()}),
        y=carpool.each(**{name: y for name, (_, _, y) in made.items()}),
        epochs=3,
        **PLAIN,
    )
    for name, (model, x, y) in made.items():
        alone, _, _ = three(name)
        assert_history(done[name], alone.fit(x, y, epochs=3, shuffle=False, verbose=0).history)
        assert_same(model, alone)
        assert model.history.history.keys() == alone.history.history.keys()


def test_a_group_of_different_learning_rates_shares_one_trace(only_programs, traces):
    x, y = numbers(64)

    def make(seed):
        return build(hidden, seed=seed, optimizer=keras.optimizers.Adam(10.0 ** -(seed + 1)))

    done = compare(make, x, y, jobs=4)
    assert {result.strategy for result in done} == {"fused"}
    assert len(traces) == 1


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_second_fit_of_the_same_models_traces_nothing(only_programs, traces, jit_compile):
    x, y = numbers()
    models = [build(hidden, seed=seed, jit_compile=jit_compile) for seed in range(2)]
    carpool.fit(models, x=x, y=y, epochs=2, batch_size=16, **PLAIN)
    before = len(traces)
    assert before == 2  # batches of 16, and the short last one
    assert all(program.is_jit is jit_compile for program in traces)
    carpool.fit(models, x=x, y=y, epochs=2, batch_size=16, **PLAIN)
    carpool.fit([build(hidden, seed=7, jit_compile=jit_compile)], x=x, y=y, batch_size=16, **PLAIN)
    assert len(traces) == before


def test_a_model_that_is_compiled_anew_is_traced_anew(only_programs):
    x, y = numbers(64)
    ours, alone = build(), build()
    for optimizer in (keras.optimizers.SGD, keras.optimizers.RMSprop):
        compile(ours, optimizer(1e-2))
        compile(alone, optimizer(1e-2))
        carpool.fit([ours], x=x, y=y, batch_size=16, **PLAIN)
        alone.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        assert_same(ours, alone)


def test_xla_ends_where_xla_alone_ends(only_programs):
    x, y = numbers(64)
    compare(
        lambda seed: build(lambda: [*hidden(), layers.Dropout(0.3, seed=seed)], seed=seed, jit_compile=True),
        x,
        y,
        jobs=2,
        beside=[1],
        rtol=1e-4,
        atol=1e-6,
    )


def test_a_step_that_xla_cannot_compile_runs_as_a_plain_graph(only_programs, traces):
    class Written(layers.Layer):
        def call(self, inputs):
            return inputs * tf.cast(tf.strings.length(tf.as_string(inputs)), inputs.dtype)

    x, y = numbers(32)
    model = build(lambda: [layers.Dense(4), Written()])
    model.jit_compile = True
    alone = build(lambda: [layers.Dense(4), Written()])
    [result] = carpool.fit([model], x=x, y=y, batch_size=16, **PLAIN)
    assert_history(result, alone.fit(x, y, batch_size=16, shuffle=False, verbose=0).history)
    assert [program.is_jit for program in traces] == [True, False]
    assert "XLA cannot compile it" in str(traces[1].plain_reason)


def test_validation_is_keras_own(only_programs):
    x, y = numbers()
    compare(lambda seed: build(hidden, seed=seed), x, y, jobs=3, validation_data=numbers(30, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_callbacks_see_and_change_their_own_model(only_programs, tmp_path, jobs):
    x, y = numbers()
    held = numbers(30, seed=1)

    def callbacks(seed, where):
        return [
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=1 + seed, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / f"{where}{seed}.weights.h5"), save_weights_only=True
            ),
        ]

    def make(seed):
        return build(hidden, seed=seed, optimizer=keras.optimizers.Adam(0.1 / (seed + 1)))

    ours = {str(seed): make(seed) for seed in range(jobs)}
    done = carpool.fit(
        ours,
        x=x,
        y=y,
        epochs=12,
        batch_size=16,
        validation_data=held,
        callbacks=carpool.each(**{str(seed): callbacks(seed, "ours") for seed in range(jobs)}),
        **PLAIN,
    )
    for seed in range(jobs):
        alone = make(seed)
        shown = alone.fit(
            x, y, epochs=12, batch_size=16, validation_data=held, callbacks=callbacks(seed, "alone"),
            shuffle=False, verbose=0,
        )  # fmt: skip
        assert_history(done[str(seed)], shown.history)
        assert_same(ours[str(seed)], alone)
        for where in ("ours", "alone"):
            assert (tmp_path / f"{where}{seed}.weights.h5").exists()
        ours[str(seed)].load_weights(tmp_path / f"ours{seed}.weights.h5")
        alone.load_weights(tmp_path / f"alone{seed}.weights.h5")
        assert_same(ours[str(seed)], alone)


def attention():
    inputs = keras.Input((5, 4))
    # Without biases: that of the keys has no gradient, and Adam makes steps of its rounding.
    hidden = layers.MultiHeadAttention(2, 3, dropout=0.2, seed=5, use_bias=False)(inputs, inputs)
    return inputs, layers.Flatten()(layers.LayerNormalization()(hidden))


ZOO = {
    "batch norm": ((6,), lambda: [layers.Dense(8), layers.BatchNormalization(), layers.ReLU()]),
    "dropout": ((6,), lambda: [layers.Dense(8), layers.Dropout(0.4, seed=3), layers.GaussianNoise(0.1, seed=4)]),
    "lstm": ((5, 4), lambda: [layers.LSTM(6)]),
    "gru": ((5, 4), lambda: [layers.GRU(6, recurrent_dropout=0.2, seed=2)]),
    "conv": ((8, 8, 1), lambda: [layers.Conv2D(4, 3), layers.MaxPooling2D(), layers.Flatten()]),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["batch norm", *(pytest.param(k, marks=pytest.mark.slow) for k in ZOO if k != "batch norm")]
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_layers_of_all_kinds(only_programs, kind, jobs):
    shape, made = ZOO[kind]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, *shape)).astype("float32"), rng.integers(0, 3, 40).astype("int32")

    def make(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input(shape), *made(), layers.Dense(3)])
        compile(model)
        return model

    compare(make, x, y, jobs=jobs, beside=[jobs - 1], validation_data=(x[:20], y[:20]))


@pytest.mark.slow
def test_attention_and_embedding(only_programs):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 40).astype("int32")

    def attending(seed):
        keras.utils.set_random_seed(seed)
        inputs, hidden = attention()
        model = keras.Model(inputs, layers.Dense(3)(hidden))
        compile(model)
        return model

    def embedding(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [keras.Input((7,), dtype="int32"), layers.Embedding(20, 5), layers.Flatten(), layers.Dense(3)]
        )
        compile(model)
        return model

    compare(attending, rng.normal(size=(40, 5, 4)).astype("float32"), y, jobs=2)
    compare(embedding, rng.integers(0, 20, (40, 7)).astype("int32"), y, jobs=2)


OPTIMIZERS = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb", "Adafactor", "Muon"]  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(only_programs, name):
    x, y = numbers(48)
    given = {"exclude_embeddings": True} if name == "Muon" else {}
    compare(
        lambda seed: build(hidden, seed=seed, optimizer=getattr(keras.optimizers, name)(1e-2, **given)),
        x,
        y,
        jobs=2,
        beside=[1],  # the other one of the two was traced
    )


@pytest.mark.slow
def test_options_of_optimizers(only_programs):
    x, y = numbers(48)
    schedule: Any = keras.optimizers.schedules.ExponentialDecay
    for make in (
        lambda: keras.optimizers.Adam(schedule(1e-2, 2, 0.5), clipnorm=0.1),
        lambda: keras.optimizers.SGD(1e-2, momentum=0.9, use_ema=True, ema_overwrite_frequency=3),
        lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2)),
    ):
        compare(lambda seed, make=make: build(hidden, seed=seed, optimizer=make()), x, y, jobs=2, beside=[1])


def test_dropout_depends_on_the_job_alone(only_programs):
    x, y = numbers()

    def dropping(name):
        return lambda: [layers.Dense(8 if name < "d" else 5), layers.Dropout(0.5, seed=ord(name))]

    def fitted(names):
        models = {name: build(dropping(name), seed=ord(name)) for name in names}
        carpool.fit(models, x=x, y=y, epochs=3, batch_size=16, seed=3, reporters=[])
        return models

    together = fitted("abcde")
    for names in ("edcba", "b", "d", "ca"):
        for name, model in fitted(names).items():
            for ours, theirs in zip(state(model), state(together[name]), strict=True):
                np.testing.assert_array_equal(ours, theirs)


class Doubled(keras.Model):
    """A train_step of its own that shows what no metric holds."""

    traced = 0

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        Doubled.traced += 1
        x, y = data
        with tf.GradientTape() as tape:
            shown: Any = self.compute_loss(x, y, self(x, training=True))
            loss = 2 * shown
        found = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
        return {"doubled": loss, "norm": tf.linalg.global_norm(found)}


def test_a_train_step_of_the_users_own_runs_in_programs(only_programs):
    x, y = numbers(64)

    def make(seed):
        keras.utils.set_random_seed(seed)
        model = Doubled()
        model.compile(
            keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        return model

    compare(make, x, y, jobs=2)
    model = make(0)
    carpool.fit([model], x=x, y=y, epochs=2, batch_size=16, **PLAIN)
    before = Doubled.traced
    carpool.fit([model], x=x, y=y, epochs=2, batch_size=16, **PLAIN)
    assert Doubled.traced == before


def test_numbers_that_no_variable_holds_stay_with_their_model(only_programs):
    x, y = numbers()

    def make(seed):
        keras.utils.set_random_seed(seed)
        normalization = layers.Normalization()
        normalization.adapt(x * (seed + 1) + seed)
        model = keras.Sequential([keras.Input((6,)), normalization, layers.Dense(3)])
        compile(model)
        return model

    compare(make, x, y, jobs=2)


def test_what_programs_cannot_run_trains_by_its_own_fit():
    x, y = numbers(64)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    ours, alone = build(), build()
    [result] = carpool.fit([ours], x=data, epochs=2, **PLAIN)
    assert_history(result, alone.fit(data, epochs=2, verbose=0, shuffle=False).history)
    assert_same(ours, alone)

    class Other(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    other = Other([keras.Input((6,)), layers.Dense(3)])
    compile(other)
    assert "make_train_function" in str(TensorFlowEngine.refusal(other))
    assert "run_eagerly" in str(TensorFlowEngine.refusal(build(run_eagerly=True)))
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert "tf.distribute" in str(TensorFlowEngine.refusal(build()))
    assert TensorFlowEngine.refusal(build()) is None


def test_a_metric_that_is_no_number_trains_by_its_own_fit():
    x, _ = numbers(64)
    y = keras.utils.to_categorical(np.arange(64) % 3)

    def make():
        model = build()
        model.compile("sgd", "mse", metrics=[keras.metrics.F1Score(average=None)])
        return model

    ours, alone = make(), make()
    alone.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    carpool.fit([ours], x=x, y=y, batch_size=16, **PLAIN)
    assert_same(ours, alone)


class Strict(keras.Sequential):
    """Raises inside its step from some step on."""

    def train_step(self, data):
        tf.debugging.assert_less(tf.cast(self.optimizer.iterations, tf.int32), 6, message="enough")
        return super().train_step(data)


def test_an_error_inside_a_program_is_the_jobs_own_and_others_finish():
    x, y = numbers(64)

    def make() -> Any:
        keras.utils.set_random_seed(0)
        model = Strict([keras.Input((6,)), layers.Dense(3)])
        compile(model)
        return model

    models = {"strict": make(), "sound": build()}
    done = carpool.fit(models, x=x, y=y, epochs=3, batch_size=16, **PLAIN)
    assert done["sound"].outcome is carpool.Outcome.COMPLETED
    assert done["strict"].outcome is carpool.Outcome.FAILED
    assert "enough" in str(done["strict"].error)
    alone = make()
    with pytest.raises(tf.errors.InvalidArgumentError, match="enough"):
        alone.fit(x, y, epochs=3, batch_size=16, shuffle=False, verbose=0)
    assert_history(done["strict"], alone.history.history)  # its own fit began anew, from what it came with


def test_programs_and_memory_go_with_their_models():
    x, y = numbers(64)
    gc.collect()
    models = [*(build(hidden, seed=seed) for seed in range(3)), Doubled(), build(lambda: [layers.Dense(5)])]
    models[3].compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    carpool.fit(models, x=x, y=y, epochs=2, batch_size=16, **PLAIN)
    programs = [weakref.ref(p) for model in models for p in tensorflow_engine._of_models[model].values()]
    assert programs
    died = [weakref.ref(one) for model in models for one in (model, model.trainable_variables[0]._value)]
    first = [weakref.ref(models[0]), weakref.ref(models[0].trainable_variables[0]._value)]
    kept = models[1]
    del models
    gc.collect()
    assert [one() for one in first] == [None, None]  # though another of its structure keeps their program
    carpool.fit([kept], x=x, y=y, batch_size=16, **PLAIN)
    del kept
    gc.collect()
    assert [one() for one in died] == [None] * len(died)
    assert [one() for one in programs] == [None] * len(programs)


def test_devices_are_those_that_tensorflow_sees():
    assert TensorFlowEngine.devices() == ("cpu",)
    [result] = carpool.fit([build()], *numbers(32), device="cpu", **PLAIN)
    assert result.outcome is carpool.Outcome.COMPLETED
