"""Models of every kind train as by `fit`: fused where that is possible, else by themselves with the reason."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Keras declares models as None and numbers as text.

import re

import keras
import keras_zoo as zoo
import numpy as np
import pytest
from keras import layers, ops

import carpool


def test_several_inputs_and_outputs_by_name_with_shared_layers_and_nested_models():
    x, y = zoo.two_in_two_out_data()
    zoo.assert_as_alone(zoo.two_in_two_out, x, y, validation_data=(x, y))


@pytest.mark.slow
def test_members_with_several_inputs_stand_together():
    x, y = zoo.two_in_two_out_data()
    results = zoo.ours([zoo.two_in_two_out(seed) for seed in range(2)], x, y, strategy="fused")
    for seed, result in enumerate(results):
        zoo.assert_history(result.history, zoo.alone(zoo.two_in_two_out(seed), x, y))


def own_model(**compile):
    with zoo.seeded(0):
        return zoo.compiled(zoo.Own(), **compile)


def own_steps():
    class Stepping(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "largest": ops.max(y_pred)}

    with zoo.seeded(0):
        return zoo.compiled(Stepping([layers.Dense(4), layers.Dense(zoo.CLASSES, activation="softmax")]))


def penalized():
    with zoo.seeded(0):
        return zoo.compiled(
            zoo.Penalized([keras.Input((5,)), layers.Dense(zoo.CLASSES, activation="softmax")]),
            metrics=[zoo.Share(), keras.metrics.SparseTopKCategoricalAccuracy(k=2)],
        )


def frozen():
    model = zoo.sequential()
    model.layers[0].trainable = False
    return zoo.compiled(model)


def lazy():
    with zoo.seeded(0):
        return zoo.compiled(
            keras.Sequential([layers.Dense(4, activation="relu"), layers.Dense(3, activation="softmax")])
        )


def with_lambda():
    with zoo.seeded(0):
        squared = layers.Lambda(lambda x: x * x)
        return zoo.compiled(keras.Sequential([squared, layers.Dense(3, activation="softmax")]))


def mixed(policy):
    with zoo.seeded(0):
        hidden = layers.Dense(6, activation="relu", dtype=policy)
        last = layers.Dense(3, activation="softmax", dtype="float32")
        return keras.Sequential([keras.Input((5,)), hidden, last])


KINDS = {
    "subclassed": own_model,
    "own metrics in the logs": own_steps,
    "own loss and metrics": penalized,
    "frozen": frozen,
    "not built": lazy,
    "lambda": with_lambda,
    "run_eagerly": lambda: own_model(run_eagerly=True),
    "jit_compile=False": lambda: own_model(jit_compile=False),
    "steps_per_execution": lambda: own_model(steps_per_execution=2),
    "mixed_bfloat16": lambda: zoo.compiled(mixed("mixed_bfloat16")),
    "mixed_float16": lambda: zoo.compiled(
        mixed("mixed_float16"), optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))
    ),
    "no loss": lambda: own_model(loss=None, metrics=None),
    "F1": lambda: zoo.sequential(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()]),
    "AUC": lambda: zoo.sequential(
        loss="categorical_crossentropy", metrics=[keras.metrics.AUC(num_thresholds=20, name="auc")]
    ),
}

if zoo.BACKEND != "jax":
    del KINDS["no loss"]  # fit itself warns there, and warnings are errors here
if zoo.BACKEND == "torch":
    del KINDS["steps_per_execution"]  # fit itself refuses it there


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind(kind):
    x, y = zoo.arrays(5)
    if kind in ("F1", "AUC"):
        y = np.eye(zoo.CLASSES, dtype="float32")[y]
    rtol = 2e-2 if "mixed" in kind and zoo.BACKEND != "jax" else zoo.RTOL
    zoo.assert_as_alone(KINDS[kind], x, y, rtol=rtol, validation_data=(x, y))


def plan(*models, **options):
    x, y = zoo.arrays(5)
    jobs = [carpool.Job(model, (x, y), name=str(i), **options) for i, model in enumerate(models)]
    return carpool.plan(jobs, device="cpu").groups


def reasons(*models, **options):
    return [(group.strategy, group.reason) for group in plan(*models, **options)]


def scaled(by):
    def loss(y_true, y_pred):
        return by * keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

    return loss


class Weighted(keras.Loss):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def call(self, y_true, y_pred):
        return self.by * keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


def dense(units=4, **options):
    return zoo.compiled(
        keras.Sequential([keras.Input((5,)), layers.Dense(units, **options), layers.Dense(3)])
    )


def times(by):
    return lambda x: x * by


FUSED = {
    "learning rates": lambda: (zoo.sequential(rate=0.1), zoo.sequential(rate=0.2)),
    "initializers and seeds": lambda: (
        dense(kernel_initializer="zeros"),
        dense(kernel_initializer=keras.initializers.RandomNormal(seed=3)),
    ),
    "one loss, made twice": lambda: (zoo.sequential(loss=scaled(2.0)), zoo.sequential(loss=scaled(2.0))),
    "one Loss, made twice": lambda: (zoo.sequential(loss=Weighted(2.0)), zoo.sequential(loss=Weighted(2.0))),
    "metrics that Keras numbers": lambda: tuple(
        zoo.sequential(
            metrics=[
                keras.metrics.SparseTopKCategoricalAccuracy(k=2),
                keras.metrics.SparseCategoricalAccuracy(),
            ]
        )
        for _ in range(2)
    ),
    "one activation, made twice": lambda: (dense(activation=times(2.0)), dense(activation=times(2.0))),
}


@pytest.mark.parametrize("case", FUSED)
def test_what_differs_in_numbers_alone_is_fused(case):
    assert [group.strategy for group in plan(*FUSED[case]())] == ["fused"]


APART = {
    "units": (lambda: (dense(), dense(6)), r"'layer 1 \(Dense\): units' is 6, expected 4|units' is 6"),
    "activation": (lambda: (dense(), dense(activation="tanh")), 'activation\' is "tanh", expected "linear"'),
    "own activations": (lambda: (dense(activation=times(2.0)), dense(activation=times(3.0))), "by=3.0"),
    "layer": (lambda: (zoo.sequential(), zoo.sequential("dropout")), "'layer 2' is Dropout, expected Dense"),
    "losses": (lambda: (zoo.sequential(loss=scaled(1.0)), zoo.sequential(loss=scaled(2.0))), "by=2.0"),
    "Losses": (
        lambda: (zoo.sequential(loss=Weighted(1.0)), zoo.sequential(loss=Weighted(2.0))),
        "compile: loss",
    ),
    "optimizer": (
        lambda: (zoo.sequential(), zoo.sequential(optimizer="Adam")),
        "'optimizer' is Adam, expected SGD",
    ),
    "schedule": (
        lambda: (zoo.sequential(schedule="exponential"), zoo.sequential(schedule="exponential", rate=1.0)),
        "initial_learning_rate' is 1.0, expected 0.05",
    ),
    "precision": (
        lambda: (zoo.compiled(mixed("mixed_bfloat16")), zoo.compiled(mixed("float32"))),
        'dtype\' is "float32", expected "mixed_bfloat16"',
    ),
    "frozen": (lambda: (zoo.sequential(), frozen()), "trainable' is false, expected true"),
    "own layers": (lambda: (own_model(), own_model()), "'model' is Own object"),
}


@pytest.mark.parametrize("case", APART)
def test_what_differs_is_named(case):
    make, words = APART[case]
    groups = plan(*make())
    assert [group.strategy for group in groups] == ["interleaved", "interleaved"]
    assert re.search(words, groups[1].reason), groups[1].reason


def test_names_of_layers_are_not_taken_for_activations():
    def named(first, second, activation):
        one, two = layers.Dense(4, name=first, activation=activation), layers.Dense(3, name=second)
        return zoo.compiled(keras.Sequential([keras.Input((5,)), one, two]))

    groups = plan(named("relu", "tanh", "tanh"), named("tanh", "relu", "relu"))
    assert len(groups) == 2


def adapted(scale):
    x, _ = zoo.arrays(5)
    with zoo.seeded(0):
        layer = layers.Normalization()
        layer.adapt(scale * x + scale)
        return zoo.compiled(keras.Sequential([keras.Input((5,)), layer, layers.Dense(zoo.CLASSES)]))


def test_layers_adapted_to_different_data_are_told_apart():
    assert len(plan(adapted(1.0), adapted(3.0))) == 2


@pytest.mark.slow
def test_layers_adapted_to_different_data_train_as_each_alone():
    x, y = zoo.arrays(5)
    results = zoo.ours([adapted(1.0), adapted(3.0)], x, y)
    for scale, result in zip((1.0, 3.0), results, strict=True):
        zoo.assert_history(result.history, zoo.alone(adapted(scale), x, y))


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="AUC trains by its own fit there")
def test_numbered_metrics_keep_their_names_in_a_stack():
    x, y = zoo.arrays(5)
    made = {"loss": "categorical_crossentropy"}
    models = [zoo.sequential(metrics=[keras.metrics.AUC(num_thresholds=20)], **made) for _ in range(2)]
    results = zoo.ours(models, x, np.eye(zoo.CLASSES)[y], strategy="fused", validation_split=0.3)
    for model, result in zip(models, results, strict=True):
        assert set(result.history) == set(model.history.history)
        shown = {name for name in result.history if not name.startswith("val_")}
        assert shown == set(model.get_metrics_result())
    assert set(results[0].history) != set(results[1].history)
