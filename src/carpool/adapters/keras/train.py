"""The Keras adapter: compiled models, fitted together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from carpool.adapters.base import Adapter, Fuser, JobState, Prepared, Session, Trained
from carpool.adapters.keras import saved
from carpool.adapters.keras.backends import engine
from carpool.adapters.keras.data import Arrays
from carpool.adapters.keras.elsewhere import described, is_elsewhere, made, seeded, taken_home, wanted
from carpool.adapters.keras.fit import Fit, is_model, read
from carpool.adapters.keras.handed import held, write
from carpool.adapters.keras.own import OwnFit
from carpool.adapters.keras.session import StackedFit
from carpool.adapters.keras.signature import signature
from carpool.arrays import Array
from carpool.errors import DeviceError, JobError, ModelError, sentence
from carpool.job import Job
from carpool.memory.size import size
from carpool.planning.cursor import Cursor
from carpool.planning.spec import ModelSpec, Signature


class KerasAdapter(Adapter):
    """Compiled Keras models, on the backend that is loaded."""

    name = "keras"
    has_callbacks = True

    def __init__(self, compile: str | bool = "auto") -> None:
        super().__init__(compile)
        self._engine = engine()
        self._fits: dict[Job, Fit] = {}
        self._signatures: dict[Job, Signature] = {}
        self._arrays: dict[Any, Arrays] = {}
        self._owners: dict[int, Job] = {}
        self.fuser = KerasFuser(self._fits.__getitem__, self._signatures.__getitem__)

    @classmethod
    def claims(cls, model: Any) -> bool:
        return is_model(model)

    def is_full(self, error: BaseException) -> bool:
        return super().is_full(error) or self._engine.is_full(error)

    def device(self, name: str) -> str:
        known = self._engine.devices()
        place = known[0] if name == "auto" else next((d for d in known if d.startswith(name)), name)
        if place not in known:
            raise DeviceError(
                sentence(f"a device out of auto, {', '.join(known)}", repr(name), 'pass device="auto"')
            )
        return place

    def describe(self, job: Job) -> ModelSpec:
        if is_elsewhere(job):
            return described(job)
        model = made(job)
        with seeded(job):  # a model that is not built is built here
            fit = read(job, model, self._arrays)
        self._refuse_shared(job, fit)
        fit.own = fit.own or self._engine.refusal(model)
        self._fits[job] = fit
        structure = signature(fit)
        if fit.own is None:
            fit.own = self._engine.trial([model], *_trial([fit], job), structure)
            structure = structure if fit.own is None else signature(fit)
        self._signatures[job] = structure
        variables = (*model.variables, *model.optimizer.variables)
        data = () if fit.training is None else ((fit.training.key, fit.training.nbytes),)
        return ModelSpec(
            str(job.name),
            self.name,
            structure,
            fit.course,
            state_bytes=sum(_bytes(variable) for variable in variables),
            step_bytes=_step_bytes(model, job.batch_size),
            data=data,
            budget_bytes=None if job.budget is None else size(job.budget),
            note=_note(fit),
        )

    def _refuse_shared(self, job: Job, fit: Fit) -> None:
        """Raises where the job's model, weights or callbacks are another's too."""
        for thing in (fit.model, *fit.model.trainable_variables, fit.model.optimizer, *fit.moments.callbacks):
            other = self._owners.setdefault(id(thing), job)
            if other is job:
                continue
            if thing in fit.moments.callbacks:
                expected = "callback objects of its own for each job"
                received, remedy = (
                    f"one {type(thing).__name__} in job {other.name!r} too",
                    "make one for each",
                )
            elif thing is fit.model.optimizer:
                expected, remedy = "an optimizer of its own for each model", "make one for each"
                received = f"one {type(thing).__name__} in job {other.name!r} too"
            else:
                expected = "a model of its own for each job"
                shared = "this model" if thing is fit.model else "some of its weights"
                received = f"{shared} in job {other.name!r} too"
                remedy = "clone it with keras.models.clone_model, and compile the clone"
            error = JobError if thing in fit.moments.callbacks else ModelError
            raise error(f"Job {job.name!r}: " + sentence(expected, received, remedy))

    def open(self, job: Job, device: str, plain: bool = False, exact: bool = False) -> Session:
        fit = self._fits[job]
        if fit.own is not None or plain or exact:
            return OwnFit(fit)
        return StackedFit([fit], self._engine, device, self._signatures[job])

    def absorb(self, job: Job, state: JobState) -> Trained:
        if is_elsewhere(job):
            return taken_home(job, state)
        if state.model:
            write(self._fits[job].model, state.model)
        return self.trained(job)

    def trained(self, job: Job) -> Trained:
        if job not in self._fits:
            return Trained(None)
        model = self._fits[job].model
        return Trained(model, model.optimizer)

    def left(self, job: Job) -> JobState:
        return JobState(Cursor(), held(self._fits[job].model))

    def environment(self, jobs: Sequence[Job]) -> Mapping[str, str]:
        return {"KERAS_BACKEND": wanted(jobs[0])}

    def weights(self, model: Any) -> Mapping[str, Array]:
        return saved.arrays_of(model.variables)

    def load_weights(self, model: Any, weights: Mapping[str, Array]) -> Any:
        saved.write(model.variables, weights)
        return model

    def optimizer_state(self, model: Any, optimizer: Any, scheduler: Any) -> Any:
        return saved.arrays_of(optimizer.variables)

    def load_optimizer(self, model: Any, optimizer: Any, scheduler: Any, state: Any) -> Any:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        saved.write(optimizer.variables, state)
        return optimizer


class KerasFuser(Fuser):
    def __init__(self, fit: Callable[[Job], Fit], key: Callable[[Job], Signature]) -> None:
        self._fit, self._key = fit, key

    def refusal(self, jobs: Sequence[Job]) -> str | None:
        fits = [self._fit(job) for job in jobs]
        own = next((fit.own for fit in fits if fit.own is not None), None)
        models = [fit.model for fit in fits]
        if (found := own or engine().stack_refusal(models)) is not None:
            return found
        return engine().trial(models, *_trial(fits, jobs[0]), self._key(jobs[0]))

    def open(
        self, jobs: Sequence[Job], width: int, device: str, prepared: Prepared = lambda *_: None
    ) -> StackedFit:
        fits = [self._fit(job) for job in jobs]
        return StackedFit(fits, engine(), device, self._key(jobs[0]), prepared)


def _trial(fits: Sequence[Fit], job: Job) -> tuple[Any, int]:
    """The first batch, and how many samples the members' pool will hold."""
    held = {fit.training.key: fit.training for fit in fits if fit.training is not None}
    first = next(iter(held.values()))
    return first.batch(job.batch_size), sum(data.length for data in held.values())


def _note(fit: Fit) -> str:
    """What the plan says of the job beside its strategy."""
    if fit.own is not None:
        return f"it trains by its model's own fit, in turns with the others, because {fit.own}"
    if fit.moments.each_batch is not None:
        return f"every batch is a launch of its own, because {fit.moments.each_batch} sees every batch"
    return ""


def _bytes(variable: Any) -> int:
    name = str(variable.dtype)
    width = 1 if name in ("bool", "int8", "uint8") else 2 if "16" in name else 8 if "64" in name else 4
    return int(np.prod(variable.shape, dtype=np.int64)) * width


def _step_bytes(model: Any, batch: int) -> int:
    """Weights' gradients, and every layer's output twice, as far as the layers say."""
    outputs = 0
    for layer in model._flatten_layers(include_self=False):
        shape = getattr(getattr(layer, "output", None), "shape", None) if _has_output(layer) else None
        if shape is not None:
            outputs += int(np.prod([dim or 1 for dim in shape[1:]], dtype=np.int64)) * batch * 4
    return 2 * outputs + sum(_bytes(variable) for variable in model.trainable_variables)


def _has_output(layer: Any) -> bool:
    try:
        return not isinstance(layer.output, list | tuple | dict)
    except (AttributeError, ValueError, RuntimeError):
        return False
