"""After carpool the user's own model goes on as after `fit`; failures and Ctrl-C leave the others as they would have been."""

import os
import signal
import threading

import keras
import keras_zoo as zoo
import numpy as np
import pytest

import carpool
from carpool import Interrupted, Outcome


def test_a_model_is_saved_evaluated_and_fitted_on_as_after_fit(tmp_path):
    x, y = zoo.arrays(5)
    reference, model = zoo.sequential(optimizer="Adam"), zoo.sequential(optimizer="Adam")
    zoo.alone(reference, x, y)
    zoo.ours([model], x, y)
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations) == 12
    zoo.assert_history(model.get_metrics_result(), reference.get_metrics_result())
    expected = reference.evaluate(x, y, verbose=0, return_dict=True)
    zoo.assert_history(model.evaluate(x, y, verbose=0, return_dict=True), expected)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    on = zoo.alone(reference, x, y, epochs=2)
    zoo.assert_history(zoo.alone(loaded, x, y, epochs=2), on)
    zoo.assert_history(zoo.ours([model], x, y, epochs=2)[0].history, on)
    zoo.assert_history(zoo.alone(model, x, y, epochs=2), zoo.alone(reference, x, y, epochs=2))
    zoo.assert_same_model(model, reference)


@pytest.mark.slow
def test_clear_session_in_between_breaks_nothing():
    x, y = zoo.arrays(5)
    first = zoo.ours([zoo.sequential(seed=i) for i in range(2)], x, y)
    keras.backend.clear_session()
    again = zoo.ours([zoo.sequential(seed=i) for i in range(2)], x, y)
    for one, two in zip(first, again, strict=True):
        zoo.assert_history(two.history, one.history)
    assert int(first[0].model.optimizer.iterations) == 12


def test_a_generator_that_raises_in_the_middle_fails_its_job_alone():
    x, y = zoo.arrays(5)

    def breaking():
        yield x[:8], y[:8]
        yield x[:8], y[:8]
        raise OSError("the disk is gone")

    beside = zoo.sequential(seed=1)
    jobs = [
        carpool.Job(zoo.sequential(), breaking(), name="broken", epochs=2, fit={"steps_per_epoch": 3}),
        carpool.Job(beside, (x, y), name="beside", epochs=3, batch_size=8, shuffle=False),
    ]
    results = carpool.train(jobs, reporters=[], device="cpu")
    assert results["broken"].outcome is Outcome.FAILED
    assert "the disk is gone" in str(results["broken"].error)
    zoo.assert_history(results["beside"].history, zoo.alone(zoo.sequential(seed=1), x, y))
    assert not fits()


def fits():
    return [thread for thread in threading.enumerate() if thread.name.startswith("carpool fit")]


def test_raising_at_the_first_error_ends_the_threads_of_the_others():
    x, y = zoo.arrays(5)

    def endless():
        while True:
            yield x[:8], y[:8]

    def raises(event):
        raise RuntimeError("enough")

    jobs = [
        carpool.Job(zoo.sequential(), endless(), name="endless", fit={"steps_per_epoch": 10**6}),
        carpool.Job(zoo.sequential(seed=1), (x, y), name="raises", epochs=3, callbacks=[raises]),
    ]
    with pytest.raises(RuntimeError, match="enough"):
        carpool.train(jobs, on_error="raise", reporters=[], device="cpu")
    assert not fits()


def test_ctrl_c_gives_what_was_reached_and_leaves_no_thread():
    x, y = zoo.arrays(5)

    def endless():
        while True:
            yield x[:8], y[:8]

    def interrupts(event):
        if event.epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    jobs = [
        carpool.Job(zoo.sequential(), endless(), name="own", fit={"steps_per_epoch": 10**6}),
        carpool.Job(zoo.sequential(seed=1), (x, y), name="stack", epochs=10**5, callbacks=[interrupts]),
    ]
    with pytest.raises(Interrupted) as raised:
        carpool.train(jobs, reporters=[], device="cpu")
    results = raised.value.results
    assert {result.outcome for result in results} == {Outcome.INTERRUPTED}
    assert len(results["stack"].history["loss"]) >= 2
    assert int(results["stack"].model.optimizer.iterations) == results["stack"].steps
    assert not fits()


def test_a_loss_that_turns_nan_goes_on_as_in_fit_and_disturbs_nobody():
    x, y = zoo.arrays(5)
    models = [zoo.sequential(rate=0.05), zoo.sequential(rate=float("inf"))]
    results = zoo.ours(models, x, y, strategy="fused")
    assert np.isnan(results[1].history["loss"][-1])
    assert results[1].outcome is Outcome.COMPLETED
    zoo.assert_history(results[0].history, zoo.alone(zoo.sequential(rate=0.05), x, y))


def raise_once(monkeypatch, at, error):
    """The launch of this number raises, instead of being one."""
    from carpool.adapters.keras.session import StackedFit

    advance, calls = StackedFit.advance, []

    def advanced(session, chunk):
        calls.append(chunk)
        if len(calls) == at:
            raise error
        return advance(session, chunk)

    monkeypatch.setattr(StackedFit, "advance", advanced)


def test_a_stack_that_falls_back_starts_again_from_what_the_models_came_with(monkeypatch):
    """Also where callbacks had been given what the stack had reached."""
    x, y = zoo.arrays(5)
    raise_once(monkeypatch, 3, ValueError("a launch failed"))
    seen = [[], []]
    callbacks = {
        str(i): [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs, i=i: seen[i].append(epoch))]
        for i in range(2)
    }
    models = [zoo.sequential(seed=i) for i in range(2)]
    results = zoo.ours(models, x, y, callbacks=carpool.each(**callbacks))
    assert "a launch failed" in results[0].reason
    for i, result in enumerate(results):
        reference = zoo.sequential(seed=i)
        zoo.assert_history(result.history, zoo.alone(reference, x, y))
        zoo.assert_same_model(result.model, reference)
        assert seen[i][-3:] == [0, 1, 2]


def test_a_device_that_is_full_is_left_and_the_jobs_go_on_by_themselves(monkeypatch):
    x, y = zoo.arrays(5)
    raise_once(monkeypatch, 2, MemoryError("no room"))
    results = zoo.ours([zoo.sequential(seed=i) for i in range(2)], x, y)
    for i, result in enumerate(results):
        zoo.assert_history(result.history, zoo.alone(zoo.sequential(seed=i), x, y))


def test_verify_compares_later_steps_too():
    x, y = zoo.arrays(5)
    events = []
    models = [zoo.sequential(seed=i) for i in range(2)]
    zoo.ours(models, x, y, verify=True, reporters=[events.append])
    checks = [event for event in events if type(event).__name__ == "GroupVerified"]
    assert all(event.checked for event in checks)
    if zoo.BACKEND == "tensorflow":  # a step is Keras' own there: there is nothing to compare it with
        assert not checks
    else:
        assert len(checks) >= 2
    for seed, model in enumerate(models):
        alone = zoo.sequential(seed=seed)
        zoo.alone(alone, x, y)
        zoo.assert_same_model(model, alone)


@pytest.mark.skipif(zoo.BACKEND == "tensorflow", reason="a step is Keras' own there")
def test_a_later_step_that_differs_is_found_by_verify(monkeypatch):
    from carpool.adapters.keras import backends

    kind = backends.engine()
    after = kind.after_step

    def differs(engine, stacked, row, logs):
        return {name: value + 1.0 for name, value in after(engine, stacked, row, logs).items()}

    x, y = zoo.arrays(5)
    zoo.ours(
        [zoo.sequential(seed=i) for i in range(2)], x, y
    )  # the first step of the structure is known to be right
    monkeypatch.setattr(kind, "after_step", differs)
    results = zoo.ours([zoo.sequential(seed=i) for i in range(2)], x, y, verify=True)
    assert "differs by" in results[0].reason


@pytest.mark.slow
def test_many_members_are_repacked_when_most_have_ended(monkeypatch):
    from carpool.executors import driver

    monkeypatch.setattr(driver, "repacked", lambda width, active, *_: 1 if width > active == 1 else None)
    x, y = zoo.arrays(5)
    epochs = carpool.each(**{"0": 1, "1": 4, "2": 2})
    heard = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    callbacks = carpool.each(**{"0": [], "1": [heard], "2": []})
    split = {"validation_split": 0.3}
    models = [zoo.sequential(seed=i) for i in range(3)]
    results = zoo.ours(models, x, y, epochs=epochs, callbacks=callbacks, shuffle=True, **split)
    own = zoo.ours({"1": zoo.sequential(seed=1)}, x, y, epochs=4, shuffle=True, **split)["1"]
    zoo.assert_history(results["1"].history, own.history)
    zoo.assert_same_model(models[1], own.model)


def test_a_model_is_compared_as_precisely_as_its_least_precise_layer_computes():
    from carpool.adapters.keras.check import lowest_of

    model = zoo.sequential(seed=0)
    assert lowest_of(model) == "float32"
    mixed = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="mixed_bfloat16")])
    assert lowest_of(mixed) == "bfloat16"
