"""From a job to TensorFlow objects: factories called, variables created, the training step traced once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from carpool.adapters.named import imported
from carpool.adapters.tensorflow import mirrored, trace
from carpool.adapters.tensorflow.arrays import Arrays
from carpool.adapters.tensorflow.held import Held, captured
from carpool.adapters.tensorflow.modules import is_module, variables
from carpool.adapters.tensorflow.optimizer import build_optimizer, slots
from carpool.adapters.tensorflow.says import says
from carpool.adapters.tensorflow.step import Objective, objective, own_step, packed, training_step
from carpool.adapters.tensorflow.streams import Piped, Streamed
from carpool.ambient import seeded
from carpool.errors import CarpoolError, JobError, LossError, ModelError, OptimizerError, failure
from carpool.job import Job

SEED = tf.TensorSpec((2,), tf.int64)
_SHARED_FUNCTION = "singleton tf.Variables"

Data = Arrays | Piped | Streamed
Read = Callable[[Job, Any, str], Any]
"""A job's data or validation data, under its word: what the job names, checked."""


@dataclass(eq=False)
class Built:
    """A job's objects. The user's own variables are the truth: training changes them in place."""

    job: Job
    model: Any
    optimizer: Any
    data: Data
    validation: Arrays | None
    names: tuple[str, ...]
    """Of what a step shows, the loss first."""
    variables: tuple[Held, ...]
    """Of the model."""
    others: tuple[Held, ...]
    """What else a step reads or writes: the optimizer's slots, states of random generators."""
    step: Callable[[Any, Any], tuple[Any, Any]]
    strategy: Any
    is_exact: bool
    """Whether its functions are traced for each size of a batch, because Python in them wants to know it."""
    random: str | None
    """The operation that draws from TensorFlow's global generator, if one does."""
    _steps: dict[Any, Any] = field(default_factory=dict)
    _tests: dict[Any, Any] = field(default_factory=dict)

    def once(self, size: int | None = None) -> Any:
        """The training step, traced for batches of this size; None: for batches of any size, or as the dataset says."""
        if size not in self._steps:
            self._steps[size] = traced(self.job, self.step, _batch(self.data, size))
        return self._steps[size]

    def tested(self, size: int | None) -> Any:
        """The validation of a batch, likewise."""
        if size not in self._tests:
            assert self.validation is not None
            compute = objective(self.job, self.model, training=False)
            test = mirrored.tested(compute, self.strategy)
            self._tests[size] = traced(self.job, test, self.validation.batch(size))
        return self._tests[size]

    @property
    def any_size(self) -> int | None:
        """What to trace the step for: None, for batches of any size, unless its Python wants to know how many samples there are."""
        return self.first_size if self.is_exact else None

    @property
    def first_size(self) -> int:
        """Of the batches that are read first; 0 where only the stream knows."""
        return min(self.job.batch_size, self.data.length) if isinstance(self.data, Arrays) else 0


def build(job: Job, read: Read) -> Built:
    _check(job)
    data = read(job, job.data, "data")
    validation = job.validation_data
    held = read(job, validation, "validation_data") if validation is not None else None
    with seeded(job.seed):
        return _built(job, data, held)


def _built(job: Job, data: Data, validation: Arrays | None) -> Built:
    """The job's objects as after `tf.random.set_seed(seed)`."""
    model = build_model(job)
    strategy = mirrored.strategy_of(variables(model))
    names: list[str] = []
    probed, is_exact = _probed(job, model, data, names, strategy)
    own = variables(model)
    trained = [held.variable for held in own if held.trainable]
    if not trained:
        remedy = "give it tf.Variables, in __init__ or in its first call"
        raise ModelError(says(job, "a module with trainable variables", "none", remedy))
    strategy = mirrored.strategy_of(own)
    optimizer = build_optimizer(job, trained, strategy)
    if optimizer is None:
        _check_updates(job, own, probed)
    changed = trace.written(probed)
    beside = (*own, *captured([probed], own))
    rest = [h for h in beside if not h.trainable and any(id(handle) in changed for handle in h.handles)]
    compute = objective(job, model, training=True)
    built = Built(
        job=job,
        model=model,
        optimizer=optimizer,
        data=data,
        validation=validation,
        names=tuple(names),
        variables=own,
        others=(),
        step=_step(job, compute, trained, rest, optimizer, strategy),
        strategy=strategy,
        is_exact=is_exact,
        random=trace.draws_globally(probed),
    )
    built.others = _others(built, slots(optimizer))
    return built


def _others(built: Built, known: tuple[Held, ...]) -> tuple[Held, ...]:
    """A strategy has variables of its own, in which no training is: beside it, an optimizer that lists its variables is believed."""
    stepped = built.once(built.any_size)
    if built.strategy is not None and known:
        return known
    return (*known, *captured([stepped], (*built.variables, *known)))


def _step(
    job: Job, compute: Objective, trained: list[Any], rest: list[Held], optimizer: Any, strategy: Any
) -> Callable[[Any, Any], tuple[Any, Any]]:
    if strategy is not None:
        return mirrored.training_step(job, compute, trained, optimizer, strategy)
    if optimizer is None:
        return own_step(compute)
    return training_step(compute, trained, rest, optimizer, job.clip_norm)


def _probed(job: Job, model: Any, data: Data, names: list[str], strategy: Any) -> tuple[Any, bool]:
    """What the step shows of a batch, traced and never run: modules that make their variables in their first call make them here.

    Also, whether it can only be traced for batches of a known size.
    """
    compute = objective(job, model, training=True)

    def shown(batch: Any, seed: Any) -> Any:
        values = compute(batch, seed)
        names[:] = values
        return packed(values)

    def asked(size: int | None) -> Any:
        with mirrored.scope(strategy):
            return traced(job, mirrored.on_one(shown, strategy), _batch(data, size))

    if not isinstance(data, Arrays) or strategy is not None:
        exact = isinstance(data, Arrays)
        return asked(min(job.batch_size, data.length) if isinstance(data, Arrays) else None), exact
    before = variables(model)
    try:
        return asked(None), False
    except CarpoolError:
        raise
    except BaseException as error:
        failure(error)
        if len(variables(model)) > len(before):  # what a trace that failed has created never gets a value
            raise
        return asked(
            min(job.batch_size, data.length)
        ), True  # what is wrong with it in any case is raised here


def _batch(data: Data, size: int | None) -> Any:
    if isinstance(data, Piped):
        return data.batch()
    return (data.first if isinstance(data, Streamed) else data).batch(size)


def traced(job: Job, function: Callable[[Any, Any], Any], batch: Any) -> Any:
    """A function of this job alone, its unseeded random operations seeded by the job.

    Raises with the job's name, and with the remedy where it shares a `tf.function` with another.
    """
    try:
        with seeded(job.seed):
            return tf.function(function, autograph=False).get_concrete_function(batch, SEED)
    except ValueError as error:
        if _SHARED_FUNCTION not in str(error):
            raise
        remedy = "take the decorator off, or make what it creates before: optimizer.build(model.trainable_variables)"
        received = "one that calls a tf.function which creates variables, and was traced before"
        raise LossError(says(job, "a step that creates no variables", received, remedy)) from error


def _check(job: Job) -> None:
    remedies = {
        "phases": "write one step= that updates with both optimizers itself, and leave optimizer= out",
        "scheduler": "give the schedule to the optimizer: Adam(keras.optimizers.schedules.CosineDecay(...))",
        "fit": "it holds arguments of Keras' fit: leave it out",
    }
    for word, remedy in remedies.items():
        if getattr(job, word) is not None:
            raise JobError(says(job, f"a TensorFlow job without {word}=", "one", remedy))
    if job.loss is None and job.step is None:
        remedy = "pass loss=, a function of (prediction, target)"
        raise LossError(says(job, "loss= or step=", "neither", remedy))
    if job.accumulate > 1:
        remedy = "keras.optimizers.Adam(..., gradient_accumulation_steps=n) accumulates"
        raise JobError(says(job, "a TensorFlow job without accumulate=", str(job.accumulate), remedy))
    if job.precision != "inherit":
        remedy = "cast in the model or the step"
        raise JobError(says(job, 'precision="inherit" of a TensorFlow job', repr(job.precision), remedy))
    if job.optimizer is None and job.clip_norm is not None:
        raise JobError(
            says(job, "an optimizer= beside clip_norm=", "none", "clip in the step, which updates itself")
        )


def build_model(job: Job) -> Any:
    """The module itself, or what its factory makes: of the job's seed, where the factory takes an argument."""
    made = imported(job.model) if isinstance(job.model, str) else job.model
    if not is_module(made):
        if not callable(made):
            raise ModelError(
                says(job, "a tf.Module, or a factory of one", type(made).__name__, "see Job.model")
            )
        made = made(job.seed) if _takes_one(made) else made()
    if not is_module(made):
        remedy = "return a tf.Module; a compiled Keras model is trained by carpool.fit"
        raise ModelError(says(job, "a factory of a tf.Module", type(made).__name__, remedy))
    if job.loss is not None and not callable(made):
        remedy = "give it __call__, or pass step="
        raise LossError(says(job, "a module that can be called, beside loss=", type(made).__name__, remedy))
    return made


def _takes_one(factory: Any) -> bool:
    """Whether the factory cannot be called without an argument, or has one named seed."""
    try:
        signature = inspect.signature(factory)
        signature.bind()
    except TypeError:
        return True
    except ValueError:  # it does not say
        return False
    return "seed" in list(signature.parameters)[:1]


def _check_updates(job: Job, own: tuple[Held, ...], probed: Any) -> None:
    """A step without an optimizer has to update its variables itself."""
    changed = trace.written(probed)
    if not any(id(handle) in changed for held in own if held.trainable for handle in held.handles):
        remedy = "pass optimizer=, or call apply_gradients in the step"
        raise OptimizerError(
            says(
                job,
                "an optimizer, or a step that updates the model",
                "a step that changes no trainable variable",
                remedy,
            )
        )
