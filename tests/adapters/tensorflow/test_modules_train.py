"""TensorFlow jobs without Keras: steps and losses of all kinds, where they end, and what is left in the user's objects."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from modules_zoo import CROSS, Dense, Mlp, data, loss

import carpool
from carpool.adapters.tensorflow import trace
from carpool.adapters.tensorflow.train import TensorFlowAdapter
from carpool.fidelity import lowest
from carpool.planning.cursor import Chunk, Cursor
from carpool.result import Outcome

x, y = data(double=False)
PLAIN: dict[str, Any] = {"reporters": [], "device": "cpu"}


def mlp(seed: int = 0) -> Mlp:
    return Mlp(seed, tf.float32)


def job(**changes: Any) -> carpool.Job:
    given = {
        "model": mlp, "data": (x, y), "loss": loss, "optimizer": partial(keras.optimizers.Adam, 0.01),
        "batch_size": 16, "epochs": 3, "name": "a",
    } | changes  # fmt: skip
    return carpool.Job(given.pop("model"), given.pop("data"), **given)


def weights(model: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def assert_same(ours: Any, theirs: Any) -> None:
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def stepped(model: Any, batch: Any) -> Any:
    value = loss(model(batch[0]), batch[1])
    return {"loss": value, "twice": 2 * value}


def test_a_step_ends_where_its_loss_ends():
    [by_loss] = carpool.train([job()], **PLAIN)
    [by_step] = carpool.train([job(loss=None, step=stepped)], **PLAIN)
    assert_same(by_step.model, by_loss.model)
    assert by_step.history["loss"] == by_loss.history["loss"]
    np.testing.assert_allclose(by_step.history["twice"], 2 * np.asarray(by_loss.history["loss"]), rtol=1e-6)


def test_the_users_own_objects_are_trained():
    model, optimizer = mlp(), keras.optimizers.SGD(0.1)
    before = weights(model)
    [result] = carpool.train([job(model=model, optimizer=optimizer)], **PLAIN)
    assert result.model is model
    assert result.optimizer is optimizer
    assert int(optimizer.iterations) == result.steps == 12  # type: ignore[arg-type]
    assert not np.array_equal(before[1], model.variables[1].numpy())


def test_a_step_is_converted_as_a_function_of_tensorflows_own():
    def step(model: Any, batch: Any) -> Any:
        value = loss(model(batch[0]), batch[1])
        if value > 0:  # a tensor: only a converted step knows what that means
            value = value * 2
        return value

    def by_hand(model: Any, batch: Any) -> Any:
        value = loss(model(batch[0]), batch[1])
        return tf.where(value > 0, value * 2, value)

    [ours] = carpool.train([job(loss=None, step=step)], **PLAIN)
    [theirs] = carpool.train([job(loss=None, step=by_hand)], **PLAIN)
    assert_same(ours.model, theirs.model)


def test_metrics_validation_and_the_short_last_batch():
    def right(prediction: Any, target: Any) -> Any:
        return tf.reduce_mean(tf.cast(tf.argmax(prediction, 1, tf.int32) == target, tf.float32))

    [result] = carpool.train([job(metrics={"right": right}, validation_data=(x[:23], y[:23]))], **PLAIN)
    logits = result.model(x[:23])
    assert result.history["val_loss"][-1] == pytest.approx(float(loss(logits, y[:23])), rel=1e-5)
    assert result.history["val_right"][-1] == pytest.approx(float(right(logits, y[:23])), rel=1e-6)
    assert len(result.history["right"]) == 3


def test_the_best_weights_come_back():
    seen: dict[int, list[np.ndarray]] = {}
    model = mlp()

    def watch(event: Any) -> None:
        seen[event.epoch] = weights(model)

    stop = carpool.EarlyStopping("val_loss", patience=2, restore_best=True)
    held = (x[:20], (y[:20] + 1) % 3)  # what is learned makes it worse
    [result] = carpool.train(
        [job(model=model, epochs=20, stop=stop, validation_data=held, callbacks=[watch])], **PLAIN
    )
    assert result.outcome is carpool.Outcome.STOPPED
    best = int(np.argmin(result.history["val_loss"]))
    assert (result.epoch, result.metric("val_loss")) == (best, result.history["val_loss"][best])
    for ours, theirs in zip(weights(model), seen[best], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_an_index_is_a_view(strategy):
    rows = np.arange(0, 60, 2)
    views = carpool.train(
        [job(index=rows, name=f"{i}", seed=i) for i in range(2)], strategy=strategy, **PLAIN
    )
    cuts = carpool.train([job(data=(x[rows], y[rows]), name=f"{i}", seed=i) for i in range(2)], **PLAIN)
    for one, other in zip(views, cuts, strict=True):
        assert_same(one.model, other.model)


def test_python_may_want_to_know_how_many_samples_there_are():
    """Such a step is traced for each size of a batch; any other once for all."""

    def counted(model: Any, batch: Any) -> Any:
        return tf.reduce_sum(CROSS(labels=batch[1], logits=model(batch[0]))) / float(batch[0].shape[0])

    [exact] = carpool.train([job(loss=None, step=counted, validation_data=(x[:23], y[:23]))], **PLAIN)
    [free] = carpool.train([job(validation_data=(x[:23], y[:23]))], **PLAIN)
    for ours, theirs in zip(weights(exact.model), weights(free.model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(exact.history["val_loss"], free.history["val_loss"], rtol=1e-5)


def test_a_nest_of_tensors_is_data_too():
    def step(model: Any, batch: Any) -> Any:
        return loss(model(batch["in"]), batch["out"])

    [result] = carpool.train(
        [job(data={"in": tf.constant(x), "out": tf.constant(y)}, loss=None, step=step)], **PLAIN
    )
    [by_loss] = carpool.train([job()], **PLAIN)
    assert_same(result.model, by_loss.model)


def test_a_keras_layer_in_a_module_is_trained():
    class Mixed(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(3)
            self.layer.build((None, 6))

        def __call__(self, x: Any) -> Any:
            return self.layer(x)

    model = Mixed()
    before: Any = keras.ops.convert_to_numpy(model.layer.kernel)
    [result] = carpool.train([job(model=model)], **PLAIN)
    assert result.outcome is carpool.Outcome.COMPLETED
    after: Any = keras.ops.convert_to_numpy(model.layer.kernel)
    assert not np.array_equal(before, after)


def test_a_factory_is_given_the_seed_or_nothing():
    by_seed, bare = carpool.train(
        [job(model=mlp, seed=5, epochs=1), job(model=lambda: mlp(5), seed=5, epochs=1, name="b")], **PLAIN
    )
    assert_same(by_seed.model, bare.model)


def test_the_global_seed_is_nobodys():
    tf.random.set_seed(11)
    expected = [float(tf.random.uniform(())) for _ in range(2)]
    tf.random.set_seed(11)
    first = float(tf.random.uniform(()))
    carpool.train([job()], **PLAIN)
    assert [first, float(tf.random.uniform(()))] == expected


def test_a_job_goes_on_from_its_state():
    """Six epochs at once, or three, a state on the host, and three more in another session of another run."""
    [whole] = carpool.train([job(epochs=6, seed=3)], **PLAIN)
    first, second = TensorFlowAdapter(compile=False), TensorFlowAdapter(compile=False)
    half, other = job(epochs=6, seed=3), job(epochs=6, seed=3)
    state = _run(first, half, range(3), None)
    _run(second, other, range(3, 6), state)
    assert_same(second.trained(other).model, whole.model)
    for one, value in zip(second.trained(other).optimizer.variables, whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(value))


def _run(adapter: TensorFlowAdapter, one: carpool.Job, epochs: range, state: Any) -> Any:
    adapter.device("cpu")
    adapter.describe(one)
    session = adapter.open(one, "cpu")
    if state is not None:
        session.load(0, state)
    for epoch in epochs:
        for batch, size in ((0, 16), (1, 16), (2, 16), (3, 12)):
            cursor = Cursor(epoch, batch, epoch * 4 + batch)
            session.metrics(session.advance(Chunk((0,), (cursor,), size, 1)))
    [found] = session.state([0])
    session.close()
    return found


def test_states_hold_generators_and_counters_too():
    class Drawing(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.draws = Dense(6, 3, 0, 0, tf.float32), tf.random.Generator.from_seed(1)

        def __call__(self, x: Any) -> Any:
            return self.dense(x + self.draws.normal(tf.shape(x)))

    adapter, one = TensorFlowAdapter(compile=False), job(model=Drawing())
    adapter.device("cpu")
    adapter.describe(one)
    [found] = [adapter.left(one)]
    assert any(value.dtype == np.int64 and value.shape == (3,) for value in found.optimizer["state"].values())


def test_a_loss_that_is_not_finite_changes_nothing_more():
    bad = x.copy()
    bad[40] = np.nan

    def step(model: Any, batch: Any) -> Any:  # a relu makes zeros of NaNs
        return loss(model(batch[0]), batch[1]) + 0 * tf.reduce_sum(batch[0])

    def diverging(strategy: str) -> Any:
        jobs = [
            job(data=(bad, y), shuffle=False, name="bad", loss=None, step=step),
            job(name="good", loss=None, step=step),
        ]
        return carpool.train(jobs, strategy=strategy, **PLAIN)

    alone, together = diverging("interleaved"), diverging("fused")
    for results in (alone, together):
        assert results["bad"].outcome is carpool.Outcome.DIVERGED
        assert results["bad"].steps == 2
        assert all(np.isfinite(value).all() for value in weights(results["bad"].model))
    assert_same(alone["bad"].model, together["bad"].model)
    assert_same(alone["good"].model, together["good"].model)


def test_predictions_and_saved_weights(tmp_path):
    from safetensors.numpy import load_file

    results = carpool.train([job(), job(name="b", seed=1)], **PLAIN)
    models = {result.name: result.model for result in results}
    found = carpool.predict(models, x, batch_size=32)
    np.testing.assert_allclose(found["b"], results["b"].model(x), rtol=1e-5, atol=1e-6)
    TensorFlowAdapter().save(models["a"], tmp_path / "a.safetensors")
    assert set(load_file(tmp_path / "a.safetensors")) == {
        "layers.0.b", "layers.0.w", "layers.1.b", "layers.1.w",
    }  # fmt: skip


def test_xla_compiles_where_it_can_and_the_plan_tells():
    asked = TensorFlowAdapter(compile=True)
    asked.device("cpu")
    assert "XLA compiles its steps" in asked.describe(job()).note

    def spelled(model: Any, batch: Any) -> Any:
        written = tf.strings.length(tf.as_string(batch[0]))
        return loss(model(batch[0]), batch[1]) + 0 * tf.reduce_sum(tf.cast(written, tf.float32))

    assert "XLA cannot compile" in asked.describe(job(loss=None, step=spelled)).note
    text = carpool.plan([job()], device="cpu").explain()
    assert "12 steps are too few to pay for compiling" in text
    plain, compiled = (carpool.train([job()], compile=compile, **PLAIN)[0] for compile in (False, True))
    for ours, theirs in zip(weights(plain.model), weights(compiled.model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_nothing_is_traced_once_training_runs():
    traced: list[str] = []

    class Counting(Mlp):
        def __call__(self, x: Any) -> Any:
            if isinstance(x, tf.Tensor) and not hasattr(x, "numpy"):
                traced.append(str(x.shape))
            return super().__call__(x)

    at_first: list[int] = []

    def watch(event: Any) -> None:
        at_first.append(len(traced))

    carpool.train(
        [
            job(
                model=lambda seed: Counting(seed, tf.float32),
                callbacks=[watch],
                validation_data=(x[:23], y[:23]),
            )
        ],
        **PLAIN,
    )
    assert len(at_first) == 3
    assert len(set(at_first)) == 1


def test_jobs_in_one_function_are_measured(trials, monkeypatch):
    from carpool.adapters.tensorflow import session

    model = mlp()
    before = weights(model)
    jobs = [job(model=model, name="a"), job(name="b", seed=1)]
    plan = carpool.plan(jobs, device="cpu", measure=True)
    assert "measured on this device" in plan.explain()
    for ours, theirs in zip(before, weights(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert session._TIMED_STEPS > 1
    assert (
        "measured on this device"
        in carpool.plan([job(name="a"), job(name="b", seed=1)], device="cpu").explain()
    )


def test_jobs_of_different_structure_run_beside_one_another():
    class Wide(tf.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.dense = Dense(6, 3, seed, 0, tf.float32)

        def __call__(self, x: Any) -> Any:
            return self.dense(x)

    together = carpool.train([job(), job(model=Wide, name="b")], **PLAIN)
    assert {result.strategy for result in together} == {"interleaved"}
    [alone] = carpool.train([job(model=Wide, name="b")], **PLAIN)
    assert_same(together["b"].model, alone.model)


@pytest.mark.slow
def test_a_job_in_a_process_of_its_own():
    [here] = carpool.train([job(seed=2)], **PLAIN)
    [apart] = carpool.train([job(seed=2, model=mlp(2))], strategy="isolated", **PLAIN)
    assert_same(apart.model, here.model)
    assert apart.history["loss"] == here.history["loss"]


def test_random_numbers_of_nobody_are_told():
    def dropping(model: Any, batch: Any) -> Any:
        return loss(model(tf.nn.dropout(batch[0], 0.5)), batch[1])

    plan = carpool.plan([job(loss=None, step=dropping, name=name) for name in "ab"], device="cpu")
    assert {group.strategy for group in plan.groups} == {"interleaved"}
    assert "draws from TensorFlow's global generator" in plan.explain()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("batches", ["arrays", "a dataset", "batches"])
def test_a_job_that_diverges_takes_no_step_of_the_epochs_that_are_enqueued_behind(batches: str, count: int):
    """It ends as it was before the loss was not finite, however far ahead launches were enqueued."""
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    x[9] = np.nan
    pairs = [(x[first : first + 8], y[first : first + 8]) for first in range(0, 32, 8)]
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    data: Any = {"arrays": (x, y), "a dataset": whole, "batches": lambda: iter(pairs)}[batches]
    jobs = [
        carpool.Job(
            Straight,
            data,
            loss=lambda prediction, target: tf.reduce_mean((prediction - target) ** 2),
            optimizer=lambda: keras.optimizers.SGD(0.1),
            batch_size=8,
            epochs=3,
            shuffle=False,
            name=str(number),
        )
        for number in range(count)
    ]
    for result in carpool.train(jobs, device="cpu", reporters=[]):
        assert (result.outcome, result.steps) == (Outcome.DIVERGED, 1)
        once = 0.2 * x[:8].T @ y[:8] / 8
        np.testing.assert_allclose(result.model.w.numpy(), once, rtol=1e-5)


class Straight(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(tf.zeros((3, 1)))

    def __call__(self, x: Any) -> Any:
        return x @ self.w


def test_a_job_that_computes_in_less_inside_is_compared_as_that():
    """The tolerance follows the lowest precision that the trace contains."""

    def traced(inside: Any) -> Any:
        function = tf.function(lambda x: tf.cast(tf.tanh(tf.cast(x, inside)), x.dtype))
        return trace.floating(function.get_concrete_function(tf.TensorSpec((3,), tf.float64)))

    assert lowest(traced(tf.float64)) == "float64"
    assert lowest(traced(tf.float32)) == "float32"
    assert lowest(traced(tf.bfloat16)) == "bfloat16"
