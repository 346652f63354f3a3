"""Callbacks at Keras' own moments: recordings beside `fit`'s, Keras' own callbacks, and what callbacks may change."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
# Keras declares models as None and numbers as text.

import random
from typing import Any

import keras
import keras_zoo as zoo
import numpy as np
import pytest
from keras.src.backend.common.global_state import get_global_attribute

import carpool
from carpool import Outcome

MOMENTS = ("train_begin", "train_end", "epoch_begin", "epoch_end", "test_begin", "test_end")
EACH_BATCH = ("train_batch_begin", "train_batch_end")
EACH_TEST_BATCH = ("test_batch_begin", "test_batch_end")


def recorder(moments):
    """A callback that writes down every call of these moments, with what it was told and what the model held."""

    class Recorder(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.calls = []

    def wrote(moment):
        def call(self, *arguments, logs=None):
            *place, told = (*arguments, logs) if logs is not None or not arguments else arguments
            place = [argument for argument in place if argument is not None]
            weights = float(sum(np.abs(value).sum() for value in self.model.get_weights()))
            steps = int(self.model.optimizer.iterations)
            self.calls.append((moment, place, told or {}, weights, steps, dict(self.params)))

        return call

    for moment in moments:
        setattr(Recorder, f"on_{moment}", _with_signature(wrote(moment), moment))
    return Recorder()


def _with_signature(call, moment):
    if moment in ("train_begin", "train_end", "test_begin", "test_end"):
        return lambda self, logs=None: call(self, logs)
    return lambda self, place, logs=None: call(self, place, logs)


def assert_same_calls(got, expected):
    assert [(moment, place) for moment, place, *_ in got] == [
        (moment, place) for moment, place, *_ in expected
    ]
    for (moment, _, told, weights, steps, params), (_, _, other, *held) in zip(got, expected, strict=True):
        assert set(told) == set(other), moment
        for name, value in other.items():
            np.testing.assert_allclose(
                told[name], value, rtol=zoo.RTOL, atol=1e-6, err_msg=f"{moment} {name}"
            )
        np.testing.assert_allclose(weights, held[0], rtol=1e-5, err_msg=moment)
        assert (steps, params) == (held[1], held[2]), moment


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(MOMENTS, id="epochs"),
        pytest.param(MOMENTS + EACH_BATCH, id="batches", marks=pytest.mark.slow),
        pytest.param(MOMENTS + EACH_BATCH + EACH_TEST_BATCH, id="test batches"),
    ],
)
def test_callbacks_hear_what_they_hear_in_fit(moments):
    x, y = zoo.arrays(5)
    theirs, together = recorder(moments), [recorder(moments) for _ in range(2)]
    arguments = {"validation_split": 0.3, "initial_epoch": 1, "epochs": 3}
    zoo.alone(zoo.sequential(), x, y, callbacks=[theirs], **arguments)
    models = {"a": zoo.sequential(), "b": zoo.sequential(seed=1)}
    given = carpool.each(a=[together[0]], b=[together[1]])
    zoo.ours(models, x, y, callbacks=given, **arguments)
    assert_same_calls(together[0].calls, theirs.calls)
    assert len(together[1].calls) == len(theirs.calls)


def test_what_a_callback_at_each_batch_costs_is_said():
    x, y = zoo.arrays(5)
    job = carpool.Job(zoo.sequential(), (x, y), callbacks=[keras.callbacks.TerminateOnNaN()])
    reason = carpool.plan([job], device="cpu").groups[0].reason
    assert "every batch is a launch of its own, because TerminateOnNaN sees every batch" in reason


class Dropping(keras.callbacks.Callback):
    """Halves the learning rate and moves a weight after the first epoch, and stops in the middle of the third."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.5)

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = int(self.model.optimizer.iterations) == 10


class StopsAtOnce(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


CALLBACKS = {
    "EarlyStopping": lambda _: keras.callbacks.EarlyStopping(
        "val_loss", patience=1, restore_best_weights=True, start_from_epoch=1
    ),
    "LearningRateScheduler": lambda _: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "ReduceLROnPlateau": lambda _: keras.callbacks.ReduceLROnPlateau(
        "val_loss", patience=1, factor=0.1, min_delta=10.0
    ),
    "ModelCheckpoint": lambda path: keras.callbacks.ModelCheckpoint(
        f"{path}/{{epoch}}.keras", monitor="val_loss"
    ),
    "ModelCheckpoint by batch": lambda path: keras.callbacks.ModelCheckpoint(
        f"{path}/b{{epoch}}.weights.h5", save_freq=3, save_weights_only=True
    ),
    "CSVLogger": lambda path: keras.callbacks.CSVLogger(f"{path}/log.csv"),
    "BackupAndRestore": lambda path: keras.callbacks.BackupAndRestore(f"{path}/backup"),
    "TerminateOnNaN": lambda _: keras.callbacks.TerminateOnNaN(),
    "SwapEMAWeights": lambda _: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    "History": lambda _: keras.callbacks.History(),
    "user-written": lambda _: Dropping(),
    "stops at once": lambda _: StopsAtOnce(),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_keras_own_callbacks_do_what_they_do_in_fit(name, tmp_path):
    x, y = zoo.arrays(5)
    optimizer = "ema" if name == "SwapEMAWeights" else "SGD"
    reference, model = (zoo.sequential(optimizer=optimizer, rate=0.3) for _ in range(2))
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    arguments = {"validation_split": 0.3, "epochs": 4}
    expected = zoo.alone(reference, x, y, callbacks=[CALLBACKS[name](theirs)], **arguments)
    result = zoo.ours([model], x, y, callbacks=[CALLBACKS[name](ours)], **arguments)[0]
    zoo.assert_history(result.history, expected)
    zoo.assert_same_model(model, reference)
    assert sorted(p.name for p in ours.rglob("*")) == sorted(p.name for p in theirs.rglob("*"))
    is_short = len(expected["loss"]) < 4
    assert result.outcome is (Outcome.STOPPED if is_short else Outcome.COMPLETED)
    if name == "ModelCheckpoint":
        loaded = keras.models.load_model(ours / "4.keras")
        np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5)
    if name == "CSVLogger":
        ours_text, theirs_text = (ours / "log.csv").read_text(), (theirs / "log.csv").read_text()
        assert ours_text.splitlines()[0] == theirs_text.splitlines()[0]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("auto", {}),
        ("auto", {"epochs": 3}),
        ("auto", {"validation_freq": 2, "epochs": 7}),
        ("auto", {"initial_epoch": 1}),
        pytest.param("in_turn", {}, marks=pytest.mark.slow),
        pytest.param("in_turn", {"epochs": 3}, marks=pytest.mark.slow),
        pytest.param("in_turn", {"validation_freq": 2, "epochs": 7}, marks=pytest.mark.slow),
        ("in_turn", {"initial_epoch": 1}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Early stopping conditioned")  # on epochs that are not validated
def test_weights_that_keras_puts_back_are_ranked_as_what_they_are(strategy, options):
    """Keras' own EarlyStopping restores them, also when all epochs ran; the result says which epoch's they are."""
    x, y = zoo.arrays(5)
    held = (x[:9], -5 * y[:9])  # what is learned makes it worse
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True, mode="min")
    model = zoo.sequential(rate=0.1)
    arguments: dict[str, Any] = {
        "epochs": 6,
        "shuffle": False,
        "batch_size": 8,
        "callbacks": [stop],
        **options,
    }
    result: Any = zoo.ours([model], x, y, validation_data=held, strategy=strategy, **arguments)[0]
    assert result.epoch == stop.best_epoch - options.get("initial_epoch", 0)
    assert result.metric("val_loss") == pytest.approx(model.evaluate(*held, verbose=0)[0], rel=1e-5)
    assert result.metric("val_loss") == min(result.history["val_loss"])
    assert result.metric("loss") == result.history["loss"][result.epoch]
    assert (result.modes, result.is_restored) == ({"val_loss": "min"}, True)


def test_functions_and_keras_callbacks_stand_beside_one_another():
    x, y = zoo.arrays(5)
    heard, logs = [], []
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, told: logs.append(told["loss"]))
    job = carpool.Job(zoo.sequential(), (x, y), epochs=2, callbacks=[heard.append, own])
    result = carpool.train([job], reporters=[], device="cpu")[0]
    assert [event.metrics["loss"] for event in heard] == logs == list(result.history["loss"])


@pytest.mark.parametrize(
    "moment",
    [
        "on_train_begin",
        "on_epoch_begin",
        "on_test_begin",
        "on_test_end",
        "on_epoch_end",
        "on_train_batch_end",
        "on_train_end",
    ],
)
def test_a_callback_that_raises_fails_its_job_alone(moment):
    x, y = zoo.arrays(5)

    def raises(*_, **__):
        raise RuntimeError(moment)

    def watched(callback):
        """Callbacks that see batches, for both: they are in the signature."""
        return [callback, keras.callbacks.TerminateOnNaN()] if moment == "on_train_batch_end" else [callback]

    broken = keras.callbacks.Callback()
    kind = type("Broken", (keras.callbacks.Callback,), {moment: raises})
    broken, beside = kind(), recorder(MOMENTS)
    theirs = recorder(MOMENTS)
    zoo.alone(zoo.sequential(seed=1), x, y, validation_split=0.3, callbacks=[theirs])
    jobs = [
        carpool.Job(
            zoo.sequential(seed=seed),
            (x, y),
            name=name,
            epochs=3,
            batch_size=8,
            shuffle=False,
            callbacks=watched(callback),
            fit={"validation_split": 0.3},
        )
        for seed, (name, callback) in enumerate({"broken": broken, "beside": beside}.items())
    ]
    results = carpool.train(jobs, reporters=[], device="cpu")
    assert results["broken"].outcome is Outcome.FAILED
    assert str(results["broken"].error) == moment
    assert results["beside"].strategy == "fused"
    assert_same_calls(beside.calls, theirs.calls)


def test_one_callback_object_in_several_jobs_is_refused():
    x, y = zoo.arrays(5)
    one = keras.callbacks.EarlyStopping("loss")
    with pytest.raises(carpool.CarpoolError, match=r"one EarlyStopping in job '0' too.*make one for each"):
        carpool.fit([zoo.sequential(), zoo.sequential()], x, y, callbacks=[one])


def test_nothing_touches_global_random_states():
    x, y = zoo.arrays(5)
    models = [zoo.sequential("dropout", seed=i) for i in range(2)]
    streamed = carpool.Job(zoo.sequential(), iter([(x, y)]), name="streamed", fit={"steps_per_epoch": 1})
    jobs = [carpool.Job(model, (x, y), epochs=2) for model in models]
    before = random.getstate(), np.random.get_state()[1].tolist()
    seeds = get_global_attribute("global_seed_generator")
    carpool.train([*jobs, streamed], reporters=[], device="cpu")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert get_global_attribute("global_seed_generator") is seeds
