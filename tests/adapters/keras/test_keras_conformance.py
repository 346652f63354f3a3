"""The Keras adapter keeps the promise, over its zoo: the plain loop that results are held against is the model's own `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import keras
import keras_zoo as zoo
import numpy as np
import pytest

from carpool.job import Job
from carpool.result import Outcome, Result
from carpool.testing import AdapterConformance, Reference, Variant

RATE = 0.02
MADE: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()
"""How each job's model was made, so that `fit` can be given another of its kind."""


class Keras(AdapterConformance):
    """What holds of all Keras jobs, on the CPU, with the backend that is loaded."""

    fuses = tuple(model for model in zoo.MODELS if model not in zoo.UNFUSED)
    alone = "interleaved" if zoo.BACKEND == "torch" else "in_turn"  # in turn, Keras on torch draws by itself
    clip_norms = ()
    ends_at_nan = Outcome.COMPLETED
    single_models = zoo.SINGLE
    test_equals_the_plain_loop_full_cross = None  # type: ignore[assignment]  # each case compiles anew: pairs suffice

    @pytest.fixture(autouse=True)
    def _precision(self, request: pytest.FixtureRequest) -> Iterator[None]:
        model = request.node.callspec.params.get("model", self.models[0])
        is_single = "single_precision" in request.function.__name__ or not self.double(model)
        with zoo.precision("float32" if is_single else "float64"):
            yield

    def job(self, model: str, optimizer: str, scheduler: str, variant: Variant, double: bool = True) -> Job:
        """A schedule is part of a structure, a rate that is a number is each member's own."""
        assert keras.config.floatx() == ("float64" if double else "float32")
        rate = RATE * variant.scale if scheduler == "constant" else RATE
        make = partial(zoo.sequential, model, variant.seed, rate, optimizer, scheduler)
        made = make()
        MADE[made] = make
        return Job(
            made,
            zoo.data_of(model),
            batch_size=8,
            epochs=variant.epochs,
            seed=variant.seed,
            shuffle=model in zoo.RANDOM,
            **variant.options,
        )

    def reference(self, job: Job) -> Reference:
        return fitted(job, times=1)

    def left(self, result: Result) -> Reference:
        return shown(result.model, result.history["loss"])

    def continued(self, job: Job, result: Result) -> Job:
        return replace(job, model=result.model)

    def reference_continued(self, job: Job) -> Reference:
        if keras.backend.backend() == "jax" and MADE[job.model]().optimizer.use_ema:
            pytest.skip("Keras' own second fit of a model with averaged weights raises on JAX")
        return fitted(job, times=2)


class TestKeras(Keras):
    """Every model and schedule, with optimizers to which a weight's shape matters and some to which it does not."""

    models = tuple(zoo.MODELS)
    random_models = zoo.RANDOM
    optimizers = ("SGD", "Adam", "Adafactor", "Lamb")
    schedulers = tuple(zoo.SCHEDULES)
    fast_cases = 1


class TestKerasOptimizers(Keras):
    """Every optimizer."""

    models = ("mlp",)
    optimizers = tuple(zoo.OPTIMIZERS)
    schedulers = ("constant", "cosine")
    fast_cases = 1


def fitted(job: Job, times: int) -> Reference:
    """What `fit` leaves in a model of the job's kind."""
    model, (x, y) = MADE[job.model](), job.data
    losses: Sequence[float] = ()
    for _ in range(times):
        losses = zoo.alone(model, x, y, batch_size=job.batch_size, epochs=job.epochs)["loss"]
    return shown(model, losses)


def shown(model: Any, losses: Sequence[float]) -> Reference:
    """By place: Keras numbers the names of all layers that it has ever made."""
    return Reference(
        weights={
            f"{place} {variable.name}": values(variable) for place, variable in enumerate(model.variables)
        },
        slots={
            "optimizer": {str(place): values(slot) for place, slot in enumerate(model.optimizer.variables)}
        },
        rates=[values(model.optimizer.learning_rate).item()],
        history=list(losses),
    )


def values(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))
