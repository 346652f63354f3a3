"""Which adapter takes a model: a table of names, loaded late, so that importing carpool imports no framework."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from carpool.adapters.base import Adapter
from carpool.adapters.tensorflow.factories import makes_modules
from carpool.errors import ModelError, sentence
from carpool.executors.interrupt import WholeImports
from carpool.job import Job

TABLE = {
    "keras": "carpool.adapters.keras.train:KerasAdapter",  # before torch: a Keras model on torch is a torch module too
    "torch": "carpool.adapters.torch.train:TorchAdapter",
    "jax": "carpool.adapters.jax.train:JaxAdapter",
    "tensorflow": "carpool.adapters.tensorflow.train:TensorFlowAdapter",  # after Keras: a model of Keras is no plain module
    "tensorflow-graph": "carpool.adapters.graph.train:GraphAdapter",
    "loop": "carpool.adapters.loop.train:LoopAdapter",
}
NEEDS = {"tensorflow-graph": "tensorflow"}
"""The module that has made an adapter's models, where it is not of the adapter's name."""


def load(name: str) -> type[Adapter]:
    """The adapter class of this name."""
    module, _, attribute = TABLE[name].partition(":")
    if module not in sys.modules:
        with WholeImports():
            importlib.import_module(module)
    return getattr(importlib.import_module(module), attribute)


def claiming(model: Any) -> type[Adapter]:
    """The adapter that takes this model. Only frameworks that are already imported can have made an object."""
    for name in TABLE:
        if (NEEDS.get(name, name) in sys.modules or name == "loop") and load(name).claims(model):
            return load(name)
    raise ModelError(
        sentence(
            "a model of torch, JAX, Keras or TensorFlow, or a factory of one",
            f"{type(model).__name__}",
            "see Job.model",
        )
    )


def has_weights(model: Any) -> bool:
    """Whether this is a model of some framework, and not what a loop of the user's own returned."""
    return any(
        NEEDS.get(name, name) in sys.modules and load(name).claims(model) for name in TABLE if name != "loop"
    )


def for_factory(job: Job) -> type[Adapter]:
    """The adapter that will call a job's factory.

    Keras' where the job holds arguments of `fit`, JAX's where its optimizer is one of optax or the factory needs an argument, a key,
    TensorFlow's where what the job names is TensorFlow's (`tensorflow/factories.py`), else torch's.
    """
    if job.fit is not None:
        return load("keras")
    optimizer = job.optimizer[0] if isinstance(job.optimizer, tuple) and job.optimizer else job.optimizer
    is_optax = _root(optimizer) in ("optax", "flax") or _updates(job.optimizer)
    if not is_optax and makes_modules(job):
        return load("tensorflow")
    needs_key = job.optimizer is None and "jax" in sys.modules and _needs_one(job.model)
    return load("jax" if is_optax or needs_key else "torch")


def _root(optimizer: Any) -> str:
    """The package that an optimizer is of; one of optax that was not called is a function of it."""
    kind = optimizer if inspect.isfunction(optimizer) else type(optimizer)
    return (kind.__module__ or "").partition(".")[0]


def _needs_one(factory: Any) -> bool:
    """Whether it cannot be called without an argument: the factories of other frameworks can."""
    try:
        inspect.signature(factory).bind()
    except TypeError:
        return True
    except ValueError:  # it does not say
        return False
    return False


def _updates(optimizer: Any) -> bool:
    """Whether it is a pair of functions as optax has them; its own class is a tuple too."""
    return callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
