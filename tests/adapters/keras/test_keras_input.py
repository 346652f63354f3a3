"""Misuse is told before anything runs: what was expected, what came, what to do."""

import keras
import keras_zoo as zoo
import numpy as np
import pytest
from keras import layers

import carpool
from carpool.errors import DataError, JobError, ModelError, OptionError

X, Y = zoo.arrays(5)


def uncompiled():
    return keras.Sequential([keras.Input((5,)), layers.Dense(3)])


def sharing():
    shared = layers.Dense(4)
    return [
        zoo.compiled(keras.Sequential([keras.Input((5,)), shared, layers.Dense(3, activation="softmax")]))
        for _ in range(2)
    ]


def lazily_sharing():
    shared = layers.Dense(4)
    return [zoo.compiled(keras.Sequential([shared, layers.Dense(3, activation="softmax")])) for _ in range(2)]


def with_one_optimizer():
    one = keras.optimizers.SGD(0.1)
    return [zoo.compiled(zoo.sequential(), optimizer=one) for _ in range(2)]


def twice():
    model = zoo.sequential()
    return {"a": model, "b": model}


CASES = {
    "not compiled": (lambda: [uncompiled()], {}, ModelError, "a compiled model.*model.compile"),
    "one model twice": (twice, {}, ModelError, "this model in job 'a' too.*clone_model"),
    "shared layers": (sharing, {}, ModelError, "some of its weights in job '0' too"),
    "shared layers, not built": (lazily_sharing, {}, ModelError, "some of its weights in job '0' too"),
    "shared optimizer": (with_one_optimizer, {}, ModelError, "an optimizer of its own.*one SGD in job '0'"),
    "lengths": (
        lambda: [zoo.sequential()],
        {"y": Y[:-1]},
        DataError,
        "data that fits together.*of one length",
    ),
    "shapes": (lambda: [zoo.sequential()], {"x": X[:, :4]}, DataError, "data that its model takes"),
    "labels": (
        lambda: [zoo.sequential(loss="categorical_crossentropy")],
        {"y": np.zeros((len(X), 7), "float32")},
        DataError,
        "data that its model takes",
    ),
    "no samples": (lambda: [zoo.sequential()], {"x": X[:0], "y": Y[:0]}, DataError, "at least one sample"),
    "no data": (lambda: [zoo.sequential()], {"x": None}, DataError, "pass x"),
    "unknown name": (twice, {"epochs": carpool.each(a=1, c=2)}, JobError, "names out of a, b.*'c'.*rename"),
    "missing name": (twice, {"epochs": carpool.each(a=1)}, JobError, "a value for every model.*none for 'b'"),
    "unknown argument": (
        lambda: [zoo.sequential()],
        {"epoch": 3},
        OptionError,
        "fit arguments out of.*'epoch'",
    ),
    "no epochs": (lambda: [zoo.sequential()], {"epochs": 0}, JobError, "epochs of at least 1"),
    "initial_epoch": (lambda: [zoo.sequential()], {"initial_epoch": 3}, OptionError, "below epochs=3"),
    "split": (lambda: [zoo.sequential()], {"validation_split": 2.0}, OptionError, "from 0 to below 1"),
    "split of a stream": (
        lambda: [zoo.sequential()],
        {"x": iter([(X, Y)]), "y": None, "validation_split": 0.2},
        DataError,
        "arrays for validation_split",
    ),
    "labels beside a stream": (lambda: [zoo.sequential()], {"x": iter([(X, Y)])}, DataError, "alone as data"),
    "index": (lambda: [zoo.sequential()], {"index": [0, 999]}, DataError, "index within 0..25"),
    "each for the run": (
        twice,
        {"device": carpool.each(a="cpu", b="cpu")},
        OptionError,
        "one device for the run",
    ),
    "no models": (list, {}, JobError, "at least one model"),
    "one model, bare": (zoo.sequential, {}, JobError, "a dict or a list"),
    "not a callback": (lambda: [zoo.sequential()], {"callbacks": [3]}, JobError, "callbacks that are"),
    "a backend that there is not": (
        lambda: [zoo.sequential()],
        {"backend": "mxnet"},
        OptionError,
        "a backend out of",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_misuse_is_told(case):
    make, arguments, error, words = CASES[case]
    with pytest.raises(error, match=words):
        carpool.fit(make(), **{"x": X, "y": Y, "epochs": 3, "reporters": [], **arguments})


@pytest.mark.parametrize("word", ["loss", "optimizer", "metrics", "clip_norm", "accumulate", "precision"])
def test_what_keras_says_in_compile_is_not_said_in_the_job(word):
    values = {"metrics": {"m": max}, "clip_norm": 1.0, "accumulate": 2, "precision": "bf16"}
    job = carpool.Job(zoo.sequential(), (X, Y), **{word: values.get(word, max)})
    with pytest.raises(JobError, match=f"a Keras job without {word}="):
        carpool.train([job], reporters=[])


def test_strategy_fused_says_why_it_cannot():
    with pytest.raises(carpool.CarpoolError, match="Cannot fuse '0': no other job has its structure"):
        carpool.fit([zoo.sequential()], X, Y, strategy="fused", reporters=[])
