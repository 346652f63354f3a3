"""Keras jobs in worker processes: asked for, and where a job's backend is not the loaded one."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportAttributeAccessIssue=false
# Keras declares models as None and numbers as text.

from functools import partial
from importlib.util import find_spec

import keras
import keras_zoo as zoo
import pytest

import carpool
from carpool.errors import JobError, ModelError

OTHER = next(
    name
    for name in ("torch", "tensorflow", "jax")
    if name != zoo.BACKEND and (find_spec(f"carpool.adapters.keras.{name}_engine") or name == "tensorflow")
)


@pytest.mark.slow
def test_isolated_jobs_end_as_their_own_fits_would_and_the_users_models_hold_it():
    x, y = zoo.arrays(5)
    model, reference = zoo.sequential(optimizer="Adam"), zoo.sequential(optimizer="Adam")
    stop = keras.callbacks.EarlyStopping("loss", patience=5)
    expected = zoo.alone(reference, x, y)
    result = zoo.ours([model], x, y, callbacks=[stop], strategy="isolated")[0]
    assert result.strategy == "isolated"
    zoo.assert_history(result.history, expected)
    assert result.model is model
    zoo.assert_same_model(model, reference)
    zoo.assert_history(model.history.history, expected)
    zoo.assert_history(zoo.alone(model, x, y, epochs=1), zoo.alone(reference, x, y, epochs=1))


@pytest.mark.parametrize("make", [partial(zoo.sequential, "mlp", 3), "keras_zoo:sequential"])
def test_a_factory_is_called_as_it_is(make):
    x, y = zoo.arrays(5)
    job = carpool.Job(make, (x, y), epochs=2, batch_size=8, shuffle=False, fit={})
    result = carpool.train([job], reporters=[], device="cpu")[0]
    made = zoo.sequential() if isinstance(make, str) else make()
    zoo.assert_history(result.history, zoo.alone(made, x, y, epochs=2))
    assert isinstance(result.model, keras.Model)


def test_a_factory_of_something_else_is_refused():
    x, y = zoo.arrays(5)
    with pytest.raises(ModelError, match=r"a factory of a compiled keras.Model"):
        carpool.train([carpool.Job(dict, (x, y), fit={})], reporters=[])


def test_a_job_of_another_backend_is_planned_for_a_worker():
    x, y = zoo.arrays(5)
    job = carpool.Job(zoo.sequential, (x, y), fit={"backend": OTHER})
    group = carpool.plan([job], device="cpu").groups[0]
    assert group.strategy == "isolated"
    assert f"it asks for Keras' {OTHER} backend, and {zoo.BACKEND} is the loaded one" in group.reason
    with pytest.raises(JobError, match="is the loaded one"):
        carpool.plan([job], device="cpu", strategy="in_turn")
    live = carpool.Job(zoo.sequential(), (x, y), fit={"backend": OTHER})
    with pytest.raises(JobError, match="pass the function that builds and compiles it"):
        carpool.plan([live], device="cpu")


@pytest.mark.skipif(
    find_spec(f"carpool.adapters.keras.{OTHER}_engine") is None, reason=f"no engine for {OTHER}"
)
def test_a_job_of_another_backend_trains_in_a_worker_that_loads_it():
    x, y = zoo.arrays(5)
    model = zoo.sequential()
    start = model.get_weights()
    job = carpool.Job(
        zoo.sequential, (x, y), name="there", epochs=2, batch_size=8, shuffle=False, fit={"backend": OTHER}
    )
    beside = carpool.Job(model, (x, y), name="here", epochs=2, batch_size=8, shuffle=False)
    results = carpool.train([job, beside], reporters=[], device="cpu")
    there = results["there"]
    assert there.strategy == "isolated"
    assert there.history["loss"][1] < there.history["loss"][0]
    assert isinstance(there.model, keras.Model)
    for held, weights, first in zip(there.model.get_weights(), there.value, start, strict=True):
        assert (held == weights).all()
        assert (weights != first).any()
    loss = there.model.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    assert loss < there.history["loss"][1]
