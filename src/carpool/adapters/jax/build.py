"""From a job to JAX objects: factories called, the model taken apart, the optimizer's state begun, data as arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from carpool.adapters.jax.factories import Factories
from carpool.adapters.jax.forms import Form, Parts, form_of, kind_of
from carpool.adapters.jax.keys import init_key
from carpool.adapters.jax.optimizer import Begin, build_optimizer, is_nnx
from carpool.adapters.named import imported
from carpool.ambient import seeded
from carpool.arguments import missing
from carpool.errors import DataError, JobError, LossError, ModelError, OptimizerError, described, sentence
from carpool.job import Job
from carpool.positions import positions


@dataclass(frozen=True)
class Arrays:
    """A nest of arrays with one first dimension, and the view of it that a job reads."""

    leaves: tuple[Any, ...]
    tree: Any
    index: np.ndarray | None = None

    @property
    def samples(self) -> int:
        return len(self.leaves[0])

    @property
    def length(self) -> int:
        return self.samples if self.index is None else len(self.index)

    @property
    def key(self) -> tuple[int, ...]:
        """Which arrays these are."""
        return tuple(map(id, self.leaves))

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What a sample is."""
        return (str(self.tree), *((leaf.shape[1:], str(leaf.dtype)) for leaf in self.leaves))

    def nest(self, leaves: Any) -> Any:
        return jax.tree.unflatten(self.tree, list(leaves))

    def batch(self, size: int) -> Any:
        """The shapes and types of a batch."""
        return self.nest(jax.ShapeDtypeStruct((size, *leaf.shape[1:]), _type(leaf)) for leaf in self.leaves)


@dataclass(frozen=True, eq=False)
class Built:
    """A job's objects."""

    job: Job
    model: Any
    """None where it is put together when somebody wants it: its parts were made with others'."""
    form: Form
    parts: Parts
    optimizer: Any
    state: Any
    """Of the optimizer."""
    data: Arrays
    validation: Arrays | None


Read = Callable[[Job, Any, str], Arrays]
"""A job's data or validation data, under its word: what the job names, checked."""


def build(job: Job, read: Read, factories: Factories, begin: Begin) -> Built:
    _check(job)
    data = read(job, job.data, "data")
    together = factories.made(job)
    if together is not None and not is_nnx(job.optimizer):
        model, (form, parts) = None, together
        _check_callable(job, form, "nest of arrays")
    else:
        model = build_model(job, data)
        form = _form(job, model)
        parts = form.split(model)
    if not jax.tree.leaves(parts.trained):
        raise ModelError(says(job, "a model with parameters", "no floating point array", "pass parameters"))
    optimizer, state = build_optimizer(job, parts.trained, begin)
    validation = job.validation_data
    held = read(job, validation, "validation_data") if validation is not None else None
    return Built(job, model, form, parts, optimizer, state, data, held)


def _form(job: Job, model: Any) -> Form:
    """How the model is taken apart; what an `nnx.Optimizer` is for is what is trained."""
    form = form_of(model)
    assert form is not None
    if is_nnx(job.optimizer):
        from carpool.adapters.jax.nnx import NnxForm

        if not isinstance(form, NnxForm):
            raise OptimizerError(
                says(job, "an nnx.Optimizer beside an NNX module", type(model).__name__, "pass its tx")
            )
        form = NnxForm(model, wrt=job.optimizer.wrt)
    _check_callable(job, form, type(model).__name__)
    return form


def _check_callable(job: Job, form: Form, word: str) -> None:
    if job.loss is not None and not form.is_callable:
        raise LossError(
            says(
                job,
                "a model that can be called, beside loss=",
                f"a {word}",
                "pass step= instead, or a carpool.jax.Model(parameters, apply)",
            )
        )


def _check(job: Job) -> None:
    remedies = {
        "phases": "write one step= with one optimizer, such as optax.multi_transform",
        "scheduler": "give the schedule to the optimizer: optax.adam(optax.cosine_decay_schedule(...))",
        "fit": "it holds arguments of Keras' fit: leave it out",
    }
    for word, remedy in remedies.items():
        if getattr(job, word) is not None:
            raise JobError(says(job, f"a JAX job without {word}=", "one", remedy))
    if job.loss is None and job.step is None:
        raise LossError(
            says(job, "loss= or step=", "neither", "pass loss=, a function of (prediction, target)")
        )
    if job.accumulate > 1:
        remedy = "wrap the optimizer: optax.MultiSteps(optimizer, every_k_schedule=n)"
        raise JobError(says(job, "a JAX job without accumulate=", str(job.accumulate), remedy))
    if job.precision != "inherit":
        raise JobError(
            says(
                job, 'precision="inherit" of a JAX job', repr(job.precision), "cast in the model or the step"
            )
        )


def build_model(job: Job, data: Arrays) -> Any:
    """The model itself, or what its factory makes of the job's key."""
    made = imported(job.model) if isinstance(job.model, str) else job.model
    if not _is_model(made):
        if not callable(made):
            raise ModelError(
                says(
                    job, "parameters, a module, or a function of a key", type(made).__name__, "see Job.model"
                )
            )
        _check_factory(job, made)
        with seeded(job.seed):
            made = made(init_key(job.seed))
    if _is_unbound_linen(made):
        made = _bound(made, data, job)
    if not _is_model(made):
        raise ModelError(
            says(
                job,
                "a nest of JAX arrays, a carpool.jax.Model, or a Flax or Equinox module",
                type(made).__name__,
                "return one from the factory",
            )
        )
    return made


def _check_factory(job: Job, factory: Any) -> None:
    """Whether it can be called with a key alone."""
    wanted = missing(factory, "key")
    if wanted is None:
        return
    name = str(getattr(factory, "__name__", type(factory).__name__)).strip("<>")
    received = f"{name}, which also wants {', '.join(wanted)}" if wanted else f"{name}, which takes none"
    remedy = "write it as a function of the key that its random numbers come from: lambda key: ..."
    raise ModelError(says(job, "a function of a key alone that makes a model", received, remedy))


def _is_model(model: Any) -> bool:
    return kind_of(model) is not None


def _is_unbound_linen(model: Any) -> bool:
    if "flax.linen" not in sys.modules:
        return False
    from carpool.adapters.jax.linen import LinenForm, is_bound

    return LinenForm.claims(model) and not is_bound(model)


def _bound(model: Any, data: Arrays, job: Job) -> Any:
    from carpool.adapters.jax.linen import bound

    sample = data.nest(leaf[:1] for leaf in data.leaves)
    inputs = sample[0] if isinstance(sample, tuple | list) else sample
    try:
        return bound(model, inputs, init_key(job.seed))
    except Exception as error:
        raise ModelError(
            says(
                job,
                f"{type(model).__name__}.init(key, x[:1]) to make its variables",
                described(error),
                "pass a module with variables of its own: module.bind(module.init(key, x))",
            )
        ) from error


def build_arrays(job: Job, data: Any, word: str) -> Arrays:
    """The user's nest of arrays, checked; nothing is copied."""
    index = job.index if word == "data" else None
    if job.loss is not None and not (isinstance(data, tuple | list) and len(data) == 2):
        raise DataError(
            says(job, f"{word}=(x, y) beside loss=", type(data).__name__, "pass a pair, or use step=")
        )
    leaves, tree = jax.tree.flatten(data)
    if not leaves:
        raise DataError(says(job, f"arrays as {word}", "none", "pass a tuple of arrays (x, y)"))
    for leaf in leaves:
        if not isinstance(leaf, np.ndarray | jax.Array) or leaf.ndim == 0:
            raise DataError(
                says(job, f"NumPy or JAX arrays as {word}", type(leaf).__name__, "convert it with np.asarray")
            )
    lengths = [len(leaf) for leaf in leaves]
    if len(set(lengths)) > 1:
        raise DataError(says(job, f"arrays of one length as {word}", f"lengths {lengths}", "align x and y"))
    arrays = Arrays(tuple(leaves), tree, positions(index, lengths[0], job.name))
    if arrays.length == 0:
        raise DataError(
            says(job, f"at least one sample as {word}", "0", "pass more data, or leave the job out")
        )
    return arrays


def _type(leaf: Any) -> Any:
    """The type that JAX gives an array, which depends on whether it is told to use 64 bits."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def says(job: Job | None, expected: str, received: str, remedy: str) -> str:
    """Our message, with the job it is about, where it is about one."""
    about = "" if job is None else f"Job {job.name!r}: "
    return about + sentence(expected, received, remedy)
