"""JAX jobs in `train`: sweeps from one compile, unequal members, neighbours of other frameworks, workers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_zoo import BATCH, data, dropout, loss, mlp, plain_loop, what_is_left

import carpool
from carpool.adapters.jax import check, programs
from carpool.events import GroupVerified
from carpool.fidelity import Proof
from carpool.jax import Model
from carpool.job import Job
from carpool.result import Outcome, Results
from carpool.testing.conformance import assert_close


def job(rate: float = 0.01, seed: int = 0, model: Any = mlp, **options: Any) -> Job:
    settings = {"batch_size": BATCH, "epochs": 3, "name": f"{rate}-{seed}", **options}
    return Job(
        model, settings.pop("data", data(False)), loss=loss, optimizer=optax.adam(rate), seed=seed, **settings
    )


def run(jobs: list[Job], **options: Any) -> Results:
    return carpool.train(jobs, device="cpu", reporters=[], **options)


def assert_alone(results: Results, jobs: list[Job]) -> None:
    for result, one in zip(results, jobs, strict=True):
        (alone,) = run([one])
        assert_close(what_is_left(result), what_is_left(alone), double=False)


def test_a_hundred_rates_are_one_compile():
    x, y = data(False)
    shared = (x[:48], y[:48])
    jobs = [job(1e-3 * (i + 1), data=shared) for i in range(100)]
    before = len(programs.compiled)
    results = run(jobs)
    assert {result.strategy for result in results} == {"fused"}
    assert len(programs.compiled) == before + 1
    assert len({result.history["loss"][-1] for result in results}) == 100
    again = run(jobs)
    assert len(programs.compiled) == before + 1
    assert [r.history for r in again] == [r.history for r in results]


@pytest.mark.slow
def test_a_second_process_finds_them_in_jaxs_own_cache(tmp_path: Path):
    """Who may run code: nothing of ours is kept, and where JAX's own cache is asked for it serves all that we compile."""
    script = """
        import numpy as np, optax, jax, carpool
        from carpool.jax import Model
        found = []
        jax.monitoring.register_event_listener(lambda name, **_: found.append(name.rpartition("/")[2]))
        x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
        init = lambda key: Model({"w": jax.random.normal(key, (4, 1))}, lambda p, x: x @ p["w"])
        jobs = [carpool.Job(init, (x, y), loss=lambda p, t: ((p - t) ** 2).mean(), optimizer=optax.adam(r), seed=0, name=str(r))
                for r in np.linspace(1e-3, 1e-1, 100).tolist()]
        assert {r.strategy for r in carpool.train(jobs, reporters=[])} == {"fused"}
        print(found.count("cache_misses") > 0, found.count("cache_hits") > 0)
    """
    asked = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    env = {**os.environ, **asked, "CARPOOL_CACHE": str(tmp_path / "own")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    said = [
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert [misses for misses, _ in said] == ["True", "False"]
    assert said[1][1] == "True"
    assert [path.name for path in tmp_path.glob("own/*")] in ([], ["trials.json"])


def test_the_plain_loop_is_what_a_user_would_write():
    one = job(seed=3)
    (result,) = run([one])
    assert_close(what_is_left(result), plain_loop(one), double=False)


def test_members_of_unequal_lengths_epochs_and_views():
    x, y = data(False)
    jobs = [
        job(0.01, 0, data=(x[:50], y[:50]), epochs=4),
        job(0.02, 1, epochs=2),
        job(0.03, 2, index=np.arange(60) % 3 != 0, epochs=3),
        job(0.04, 3, shuffle=False),
    ]
    results = run(jobs, strategy="fused")
    assert [len(result.history["loss"]) for result in results] == [4, 2, 3, 3]
    assert_alone(results, jobs)


def test_members_that_read_the_same_share_an_order_until_one_ends():
    jobs = [job(0.01 * (i + 1), epochs=i + 1) for i in range(3)]
    assert_alone(run(jobs, strategy="fused"), jobs)


@pytest.mark.slow
def test_rates_of_dropout_differ_in_one_stack():
    def rated(rate: float) -> Any:
        def make(key: Any) -> Model:
            def apply(p: Any, x: Any, key: Any, train: bool) -> Any:
                kept = jax.random.bernoulli(key, 1 - rate, x.shape) / (1 - rate) if train else 1.0
                return (x * kept) @ p["w"]

            return Model({"w": jax.random.normal(key, (6, 3))}, apply)

        return make

    jobs = [job(0.01, seed, model=rated(rate)) for seed, rate in enumerate((0.1, 0.3, 0.5))]
    results = run(jobs, strategy="fused")
    assert_alone(results, jobs)


def test_arrays_that_a_function_holds_are_part_of_what_it_does():
    weights = [np.asarray([1.0, 1.0, 1.0], "float32"), np.asarray([1.0, 5.0, 0.1], "float32")]

    def weighted(weight: np.ndarray) -> Any:
        held = jnp.asarray(weight)
        return lambda p, t: (optax.softmax_cross_entropy_with_integer_labels(p, t) * held[t]).mean()

    jobs = [replace(job(0.01), loss=weighted(weight), name=str(i)) for i, weight in enumerate(weights)]
    results = run(jobs)
    assert {result.strategy for result in results} == {"interleaved"}
    assert results[0].history != results[1].history


def test_early_stopping_puts_the_best_weights_back():
    x, y = data(False)
    stop = carpool.EarlyStopping("val_loss", patience=2, restore_best=True)
    options = {"validation_data": (x[:21], y[:21]), "stop": stop, "epochs": 40}
    jobs = [job(rate, i, **options) for i, rate in enumerate((0.3, 0.003))]
    results = run(jobs, strategy="fused")
    assert results[0].outcome is Outcome.STOPPED
    for result in results:
        held = float(loss(result.model(x[:21]), y[:21]))
        assert held == pytest.approx(min(result.history["val_loss"]), rel=1e-5)
        assert result.metric("val_loss") == min(result.history["val_loss"])
        assert result.epoch == result.history["val_loss"].index(result.metric("val_loss"))
        steps = len(result.history["loss"]) * -(-len(x) // BATCH)
        assert (
            int(result.optimizer[0].count) == steps
        )  # the optimizer stays where training ended, as torch's does
    assert_alone(results, jobs)


def test_validation_is_over_every_sample_and_without_dropout():
    x, y = data(False)
    jobs = [job(0.01, i, model=dropout, validation_data=(x[:n], y[:n])) for i, n in enumerate((21, 40, 21))]
    results = run(jobs, strategy="fused")
    for result, n in zip(results, (21, 40, 21), strict=True):
        held = loss(result.model(x[:n], key=None, train=False), y[:n])
        assert result.history["val_loss"][-1] == pytest.approx(float(held), rel=1e-5)


def test_a_member_that_diverges_ends_alone():
    jobs = [job(0.01, 0), job(float("inf"), 1), job(0.02, 2)]
    results = run(jobs, strategy="fused")
    assert [r.outcome for r in results] == [Outcome.COMPLETED, Outcome.DIVERGED, Outcome.COMPLETED]
    assert_alone(results[::2], jobs[::2])  # type: ignore[arg-type]


def test_torch_and_jax_train_in_one_call():
    import torch

    x, y = data(False)
    theirs = Job(
        lambda: torch.nn.Linear(6, 3),
        (x, y.astype("int64")),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        name="torch",
    )
    ours = [job(0.01, i) for i in range(2)]
    together = run([ours[0], theirs, ours[1]])
    assert [result.outcome for result in together] == [Outcome.COMPLETED] * 3
    assert_alone(Results([together[0], together[2]], 0.0), ours)
    assert together[1].history == run([theirs])[0].history


def test_keras_and_jax_train_in_one_call():
    import keras

    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend here")
    x, y = data(False)

    def fitted(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    theirs = Job(fitted(0), (x, y), name="keras", batch_size=BATCH, epochs=2, shuffle=False)
    together = run([job(0.01, 0), theirs, job(0.02, 1)])
    expected = fitted(0).fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]  # type: ignore[arg-type]
    np.testing.assert_allclose(together[1].history["loss"], expected, rtol=1e-5)
    assert_alone(Results([together[0], together[2]], 0.0), [job(0.01, 0), job(0.02, 1)])


@pytest.mark.parametrize("said", [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}])
def test_jax_starts_without_preallocation_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, said):
    from carpool.adapters.jax import devices

    for name in devices._MEMORY:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")  # so that it is put back afterwards
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    devices.begin()
    held = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")
    assert held == (None if said else "false")


def test_verify_compares_with_each_member_alone():
    jobs = [job(0.01 * (i + 1), i) for i in range(3)]
    events: list[Any] = []
    results = carpool.train(jobs, device="cpu", verify=True, reporters=[events.append])
    assert {result.strategy for result in results} == {"fused"}
    found = [(one.checked, one.proof) for one in events if isinstance(one, GroupVerified)]
    assert found == [(3, Proof.TRACES), (3, Proof.STEPS), (3, Proof.STEPS)]
    assert_alone(results, jobs)


def test_a_job_that_computes_in_16_bits_is_compared_as_that():
    """The tolerance follows the lowest precision that the trace contains."""
    rounded = check.floating(
        jax.make_jaxpr(lambda x: (x.astype(jnp.bfloat16) * 2).astype(x.dtype))(1.0).jaxpr
    )
    assert rounded == {"bfloat16", "float32"}
    before, after = {"w": np.ones(100, np.float32)}, {"w": np.full(100, 0.9, np.float32)}
    near = {"w": after["w"] + 0.002}  # 2 % of the step
    assert check.compared("a", before, after, near, "bfloat16").mismatch is None
    assert check.compared("a", before, after, near, "float32").mismatch


def test_a_stack_that_mixes_numbers_up_is_found(monkeypatch: pytest.MonkeyPatch):
    from carpool.adapters.jax import functions

    lifted = functions.lifted

    def mixed(rows: Any) -> Any:
        found = lifted(rows)
        return replace(found, columns=tuple(column[::-1] for column in found.columns))

    monkeypatch.setattr(functions, "lifted", mixed)
    jobs = [job(0.01 * (i + 1) ** 2, i) for i in range(3)]
    results = run(jobs, verify=True)
    assert {result.strategy for result in results} == {"interleaved"}
    assert "differ" in results[0].reason
    monkeypatch.undo()
    assert_alone(results, jobs)


def test_a_step_that_raises_when_traced_fails_its_job_alone():
    def broken(prediction: Any, target: Any) -> Any:
        raise ArithmeticError("no")

    jobs = [job(0.01, 0), replace(job(0.01, 1), loss=broken)]
    results = run(jobs)
    assert [r.outcome for r in results] == [Outcome.COMPLETED, Outcome.FAILED]
    assert isinstance(results[1].error, ArithmeticError)


@pytest.mark.slow
def test_in_a_process_of_its_own():
    jobs = [job(0.01, i) for i in range(2)]
    results = run(jobs, strategy="isolated")
    assert {result.strategy for result in results} == {"isolated"}
    assert_alone(results, jobs)


@pytest.mark.slow
def test_convolutions_are_timed_and_remembered(trials: None, monkeypatch: pytest.MonkeyPatch):
    from jax_zoo import convolution

    from carpool.adapters.jax import formulation, session

    timed: list[str] = []
    times = {"convolutions as products": 1e-4, "stacked": 3e-4, "alone": 1e-3}

    def seconds(self: Any, chunk: Any, way: Any, steps: int) -> Callable[[], float]:
        timed.append(way.name)
        return lambda: times[way.name]

    monkeypatch.setattr(session.StackedSession, "_timed", seconds)
    jobs = [job(0.01, i, model=convolution) for i in range(3)]
    results = run(jobs)
    assert {result.strategy for result in results} == {"fused"}
    assert sorted(timed) == ["alone", "convolutions as products", "stacked"]
    run(jobs)
    assert len(timed) == 3
    times |= {"convolutions as products": 1e-2, "stacked": 2e-2}
    monkeypatch.setattr(formulation.recall, "remembered", lambda key: None)
    slower = run(jobs)
    assert {result.strategy for result in slower} == {"interleaved"}
    assert "takes 10 ms (compiled, convolutions as products)" in slower[0].reason
    assert_alone(results, jobs)
    assert_alone(slower, jobs)


@pytest.mark.parametrize("count", [1, 3])
def test_a_job_that_diverges_takes_no_step_of_the_epochs_that_are_enqueued_behind(count: int):
    """It ends as it was before the loss was not finite, however far ahead launches were enqueued."""
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    x[9] = np.nan
    jobs = [
        carpool.Job(
            lambda key: carpool.jax.Model({"w": jnp.zeros((3, 1))}, lambda p, x: x @ p["w"]),
            (x, y),
            loss=lambda prediction, target: ((prediction - target) ** 2).mean(),
            optimizer=optax.sgd(0.1),
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
        np.testing.assert_allclose(result.model.parameters["w"], once, rtol=1e-5)
