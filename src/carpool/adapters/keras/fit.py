"""What a Keras job asks for: its model, built and checked, its data, and the arguments that `fit` would have had."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import keras
import numpy as np

from carpool.adapters.keras.data import Arrays, Given, arrays, given, key, split
from carpool.adapters.keras.moments import Moments
from carpool.adapters.keras.nests import said
from carpool.errors import DataError, JobError, ModelError, OptionError, meant, sentence
from carpool.job import Job
from carpool.planning.cursor import Course
from carpool.positions import positions

_OF_THE_JOB = ("batch_size", "epochs", "shuffle", "validation_data", "callbacks", "seed", "index")
"""Arguments of `carpool.fit` that a Job has a field for: what else may be meant by a word that nobody knows."""


@dataclass(frozen=True)
class Options:
    """Arguments of `keras.Model.fit` that a Job has no field for; `Job(fit={...})`."""

    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_split: float = 0.0
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1


@dataclass(eq=False)
class Fit:
    """A job, ready to be described and trained."""

    job: Job
    model: Any
    options: Options
    given: Given
    given_validation: Given | None
    moments: Moments
    training: Arrays | None = None
    validation: Arrays | None = None
    index: np.ndarray | None = None
    """The samples of the training data that are read; None for all of them."""
    own: str | None = None
    """Why the job trains by its model's own `fit`, paused between batches; None where programs can run its steps."""

    @property
    def course(self) -> Course:
        epochs = self.job.epochs - self.options.initial_epoch
        if self.training is None or self.own is not None:
            return Course(length=0, batch_size=0, epochs=epochs, streamed=True)
        length = self.training.length if self.index is None else len(self.index)
        return Course(length, self.job.batch_size, epochs)

    @property
    def validation_batch(self) -> int:
        return self.options.validation_batch_size or self.job.batch_size

    def validates(self, epoch: int) -> bool:
        """Whether the epoch, counted from the job's first, ends with validation."""
        if self.given_validation is None:
            return False
        return self.model._should_eval(self.options.initial_epoch + epoch, self.options.validation_freq)


def read(job: Job, model: Any, known: dict[Any, Arrays] | None = None) -> Fit:
    """Checks the job and takes it apart. Builds what of the model is not built. `known` are arrays that others have read."""
    known = {} if known is None else known
    _check(job, model)
    options = _options(job)
    training = given(job.data)
    if options.sample_weight is not None:
        training = Given(training.x, training.y, options.sample_weight)
    validation = None if job.validation_data is None else given(job.validation_data)
    if options.validation_split and validation is None:
        training, validation = split(training, options.validation_split, str(job.name))
    _check_data(job, training)
    fit = Fit(job, model, options, training, validation, Moments(job, model))
    fit.own = _own(fit)
    if training.is_arrays:
        fit.training = _arrays(known, training, options.class_weight, str(job.name))
        if validation is not None and validation.is_arrays:
            fit.validation = _arrays(known, validation, None, str(job.name))
        fit.index = positions(job.index, fit.training.length, job.name)
        fit.own = _build(job, model, fit.training.batch(job.batch_size)) or fit.own
    return fit


def _arrays(known: dict[Any, Arrays], given: Given, weights: Any, name: str) -> Arrays:
    """Jobs of the same data share what it was converted to."""
    if (found := known.get(key(given, weights))) is None:
        found = known[key(given, weights)] = arrays(given, weights, name)
    return found


def _build(job: Job, model: Any, batch: Any) -> str | None:
    """Builds as `fit` does; why only `fit` itself can, where that is so."""
    try:
        model._symbolic_build(data_batch=batch)
    except Exception as error:
        if _builds_in_first_step(model, error):
            return "Keras cannot build it before its first step"
        raise _unfit(job, _said(error)) from error
    _check_width(job, model, batch)
    return None


def _unfit(job: Job, received: str) -> DataError:
    remedy = "look at the shapes of x and y, and at the loss; where each model has data of its own, pass carpool.each(...)"
    return DataError(f"Job {job.name!r}: " + sentence("data that its model takes", received, remedy))


def _said(error: Exception) -> str:
    """What Keras says is wrong, in one line: without colours, and without where it called what."""
    parts = re.sub(r"\x1b\[\d*m", "", str(error)).strip().split("\n\n")
    told = [part for part in parts if not part.startswith(("Exception encountered", "Arguments received"))]
    return " ".join((told or parts)[0].split()).rstrip(".") or type(error).__name__


def _check_width(job: Job, model: Any, batch: Any) -> None:
    """Of a model that was built before, which Keras does not look at again: whether the only input is of the model's shape."""
    inputs = said(model, "x")
    x = batch[0] if isinstance(batch, tuple) else batch
    if len(inputs) != 1 or not hasattr(x, "shape"):
        return
    wanted, given = tuple(inputs[0].shape)[1:], tuple(x.shape)[1:]
    if len(wanted) == len(given) and any(
        one not in (None, other) for one, other in zip(wanted, given, strict=True)
    ):
        expected = f"x of shape (samples, {', '.join(map(str, wanted))})"
        received = f"(samples, {', '.join(map(str, given))})"
        raise _unfit(job, f"{received}, where {model.name!r} takes {expected}")


def _builds_in_first_step(model: Any, error: Exception) -> bool:
    """TensorFlow's `fit` builds while it traces `train_step`, which need not call the model at all, nor its loss as Keras would."""
    has_own_step = type(model).train_step is not keras.Model.train_step
    return keras.backend.backend() == "tensorflow" and (has_own_step or not isinstance(error, ValueError))


def _own(fit: Fit) -> str | None:
    """Why programs cannot run this job, as far as its data and callbacks say."""
    if not fit.given.is_arrays:
        return f"its data is a {type(fit.given.x).__name__}, which Keras reads batch by batch"
    if fit.given_validation is not None and not fit.given_validation.is_arrays:
        return f"its validation data is a {type(fit.given_validation.x).__name__}"
    if fit.options.steps_per_epoch is not None or fit.options.validation_steps is not None:
        return "steps_per_epoch and validation_steps cut epochs anywhere"
    if fit.model.steps_per_execution > 1 and fit.moments.each_batch:
        return f"its {fit.moments.each_batch} sees batches as steps_per_execution groups them"
    if fit.model._initial_epoch:
        return "BackupAndRestore has set where its epochs begin"
    return fit.moments.own(validates=fit.given_validation is not None)


def _check(job: Job, model: Any) -> None:
    def says(expected: str, received: str, remedy: str) -> str:
        return f"Job {job.name!r}: " + sentence(expected, received, remedy)

    if not getattr(model, "compiled", False):
        raise ModelError(says("a compiled model", f"{model.name!r}, which is not", "call model.compile(...)"))
    if model.optimizer is None:
        raise ModelError(says("a model compiled with an optimizer", "none", "pass optimizer= to compile"))
    words = ("loss", "step", "optimizer", "scheduler", "metrics", "clip_norm", "phases", "stop")
    taken = next((word for word in words if getattr(job, word) is not None), None)
    if taken is not None:
        remedy = "pass it to model.compile" if taken in ("loss", "optimizer", "metrics") else "leave it out"
        raise JobError(says(f"a Keras job without {taken}=", f"{taken}=", remedy))
    if job.accumulate != 1:
        remedy = "pass gradient_accumulation_steps to the optimizer"
        raise JobError(says("a Keras job without accumulate=", str(job.accumulate), remedy))
    if job.precision != "inherit":
        raise JobError(
            says("a Keras job without precision=", repr(job.precision), 'build it under "mixed_bfloat16"')
        )


def _options(job: Job) -> Options:
    known = {field.name for field in fields(Options)}
    asked = dict(job.fit or {})
    asked.pop("verbose", None)  # carpool's reporters show progress
    asked.pop("backend", None)  # the worker that this job may need has it loaded
    unknown = next((word for word in asked if word not in known), None)
    if unknown is not None:
        raise OptionError(
            f"Job {job.name!r}: "
            + sentence(
                f"fit arguments out of {', '.join(sorted(known))}",
                repr(unknown),
                meant(unknown, (*known, *_OF_THE_JOB)) or "leave it out",
            )
        )
    options = Options(**asked)
    if not 0 <= options.initial_epoch < job.epochs:
        raise OptionError(
            f"Job {job.name!r}: "
            + sentence(
                f"initial_epoch from 0 to below epochs={job.epochs}",
                repr(options.initial_epoch),
                "epochs is the number of the last epoch, as in fit",
            )
        )
    if not 0 <= options.validation_split < 1:
        raise OptionError(
            f"Job {job.name!r}: "
            + sentence(
                "a validation_split from 0 to below 1",
                repr(options.validation_split),
                "pass a share, or data",
            )
        )
    return options


def _check_data(job: Job, training: Given) -> None:
    if job.index is not None and not training.is_arrays:
        raise DataError(
            f"Job {job.name!r}: "
            + sentence("index= beside arrays", type(training.x).__name__, "leave index= out, or pass arrays")
        )
    if not training.is_arrays and (training.y is not None or training.sample_weight is not None):
        raise DataError(
            f"Job {job.name!r}: "
            + sentence(
                f"a {type(training.x).__name__} alone as data",
                "y or sample_weight beside it",
                "let it give (x, y) batches",
            )
        )


def is_model(model: Any) -> bool:
    return isinstance(model, keras.Model)
