"""The JAX adapter keeps the promise: results do not depend on neighbours, order or strategy."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax_zoo import ALONE, MODELS, OPTIMIZERS, RANDOM, SCHEDULES, make_job, plain_loop, what_is_left

from carpool.job import Job
from carpool.result import Result
from carpool.testing import AdapterConformance, Reference, Variant


class TestJax(AdapterConformance):
    models = tuple(MODELS)
    optimizers = tuple(OPTIMIZERS)
    schedulers = tuple(SCHEDULES)
    random_models = RANDOM
    fast_cases = 1
    models_change = False
    test_equals_the_plain_loop_full_cross = None  # type: ignore[assignment]  # each case compiles anew: pairs suffice
    fuses = tuple(model for model in MODELS if model not in ALONE)

    @pytest.fixture(autouse=True)
    def in_64_bits(self):
        with jax.enable_x64(True):
            yield

    def job(self, model: str, optimizer: str, scheduler: str, variant: Variant, double: bool = True) -> Job:
        return make_job(model, optimizer, scheduler, variant, double)

    def reference(self, job: Job) -> Reference:
        return plain_loop(job)

    def left(self, result: Result) -> Reference:
        return what_is_left(result)

    def continued(self, job: Job, result: Result) -> Job:
        return replace(job, model=result.model, optimizer=(job.optimizer, result.optimizer))

    def reference_continued(self, job: Job) -> Reference:
        return plain_loop(job, passes=2)
