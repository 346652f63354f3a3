"""Jobs of a Keras backend that is not the loaded one: a process has one backend, so they train in a worker that loads theirs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

from carpool import ambient
from carpool.adapters.base import JobState, Trained
from carpool.adapters.keras.backends import BACKENDS
from carpool.adapters.keras.fit import is_model, read
from carpool.adapters.keras.seeds import draws_from
from carpool.errors import JobError, ModelError, OptionError, failure, sentence
from carpool.job import Job
from carpool.marks import Identity
from carpool.planning.cursor import Course
from carpool.planning.spec import ModelSpec


def wanted(job: Job) -> str:
    """The backend that the job asks for, or the loaded one."""
    asked = dict(job.fit or {}).get("backend") or keras.backend.backend()
    if asked not in BACKENDS:
        raise OptionError(
            f"Job {job.name!r}: "
            + sentence(f"a backend out of {', '.join(BACKENDS)}", repr(asked), "pass one of these")
        )
    return asked


def is_elsewhere(job: Job) -> bool:
    return wanted(job) != keras.backend.backend()


def described(job: Job) -> ModelSpec:
    """What can be said of the job here: its model is only made in the worker."""
    backend = wanted(job)
    if is_model(job.model):
        raise JobError(
            f"Job {job.name!r}: "
            + sentence(
                f'a function that makes the model, for backend="{backend}"',
                f"a model of the loaded backend, {keras.backend.backend()}",
                "pass the function that builds and compiles it",
            )
        )
    return ModelSpec(
        str(job.name),
        "keras",
        (("backend", backend), ("model", Identity(job))),
        Course(length=0, batch_size=0, epochs=job.epochs, streamed=True),
        state_bytes=0,
        step_bytes=0,
        apart=f"it asks for Keras' {backend} backend, and {keras.backend.backend()} is the loaded one",
    )


def taken_home(job: Job, state: JobState | None) -> Trained:
    """The job's factory called on the loaded backend, with the trained weights put in; the weights alone where that does not work."""
    if state is None:
        return Trained(None)
    weights = list(state.model["trained"])
    try:
        model = made(job)
        read(job, model)
        model.set_weights(weights)
    except BaseException as error:  # it only works on its own backend: the weights are all there is
        failure(error)
        return Trained(None, value=weights)
    return Trained(model, model.optimizer, value=weights)


@contextmanager
def seeded(job: Job) -> Iterator[None]:
    """As after `keras.utils.set_random_seed(seed)` inside, and as before outside."""
    before = get_global_attribute(GLOBAL_SEED_GENERATOR)
    with ambient.seeded(job.seed):
        try:
            draws_from(job.seed)
            yield
        finally:
            set_global_attribute(GLOBAL_SEED_GENERATOR, before)


def made(job: Job) -> Any:
    """What the job's factory makes, under the job's seed."""
    factory = job.model
    if isinstance(factory, str):
        module, _, attribute = factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ModelError(
                sentence('a model as "module:function"', repr(job.model), f"make it importable ({error})")
            ) from error
    if callable(factory) and not is_model(factory):
        with seeded(job):
            factory = factory()
    model = factory
    if not is_model(model):
        raise ModelError(
            f"Job {job.name!r}: "
            + sentence("a factory of a compiled keras.Model", type(model).__name__, "return the model")
        )
    return model
