"""The updates of a training step: one for a plain job, several for a job with `phases=`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from carpool.adapters.torch import lightning
from carpool.adapters.torch.build import (
    LivePhase,
    Step,
    build_optimizer,
    build_step,
    build_timer,
    full_step,
    in_precision,
    says,
)
from carpool.errors import LossError, ModelError, OptimizerError
from carpool.job import Job, Phase

Values = dict[str, torch.Tensor]


def build_phases(job: Job, model: nn.Module) -> tuple[LivePhase, ...]:
    """The job's updates, in the order in which a step takes them."""
    if lightning.is_lightning(job, model):
        return lightning.build_lightning_phases(job, model)
    if job.phases is None:
        optimizer = build_optimizer(job, job.optimizer, model)
        return (LivePhase("", build_step(job), optimizer, build_timer(job, job.scheduler, optimizer)),)
    names = unique([str(phase.name) for phase in job.phases])
    return tuple(_live(job, phase, name, model) for phase, name in zip(job.phases, names, strict=True))


def _live(job: Job, phase: Phase, name: str, model: nn.Module) -> LivePhase:
    optimizer = build_optimizer(job, phase.optimizer, model, _parameters(job, phase, name, model))
    objective = in_precision(job, full_step(job, phase.step))

    def step(model: nn.Module, batch: Any, place: Any) -> Values:
        values = objective(model, batch, place)
        if f"{name}_loss" in values:
            expected = f"{name}_loss to be the loss of phase {name!r}"
            raise LossError(says(job, expected, "a value of its step with that name too", "rename it"))
        return {f"{name}_loss": values.pop("loss"), **values}

    made = LivePhase(name, step, optimizer, build_timer(job, phase.scheduler, optimizer), int(phase.every))
    if not made.trained:
        raise OptimizerError(
            says(
                job,
                f"the optimizer of phase {name!r} to hold parameters",
                "none that is trained",
                "name a submodule with parameters in of=",
            )
        )
    return made


def _parameters(job: Job, phase: Phase, name: str, model: nn.Module) -> list[nn.Parameter]:
    try:
        part = model if phase.of is None else model.get_submodule(phase.of)
    except AttributeError:
        known = ", ".join(child for child, _ in model.named_children()) or "none"
        raise ModelError(
            says(
                job,
                f"phase {name!r} to be of a submodule ({known})",
                repr(phase.of),
                "name one, or leave of= out",
            )
        ) from None
    parameters = list(part.parameters())
    if not parameters:
        raise OptimizerError(
            says(
                job,
                f"parameters for phase {name!r}",
                f"none in {phase.of or 'the model'!r}",
                "name another submodule in of=",
            )
        )
    return parameters


def unique(names: Sequence[str]) -> list[str]:
    """The names, those that come twice with a number.

    >>> unique(["step", "other", "step"])
    ['step-0', 'other', 'step-1']
    """
    often, seen = Counter(names), Counter[str]()
    made = []
    for name in names:
        made.append(f"{name}-{seen[name]}" if often[name] > 1 else name)
        seen[name] += 1
    return made


def combined(job: Job, losses: Iterable[str], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of a step's phases as one: "loss" is the sum of their losses."""
    values: dict[str, Any] = {}
    for part in parts:
        twice = next((name for name in part if name in values or (name == "loss" and len(parts) > 1)), None)
        if twice is not None:
            raise LossError(
                says(job, "metrics of different names from each phase", f"{twice!r} from two", "rename one")
            )
        values |= part
    if "loss" in values:
        return values
    return {"loss": sum(values[name] for name in losses if name in values), **values}


def evaluation(job: Job, model: nn.Module, phases: Sequence[LivePhase]) -> Step:
    """What validation computes: the objective, every phase's in turn, or a validation_step."""
    if lightning.is_lightning(job, model):
        return lightning.validation(job, model)
    if not phases[0].name:
        return phases[0].step

    def evaluate(model: nn.Module, batch: Any, place: Any) -> Values:
        return combined(job, [p.loss for p in phases], [p.step(model, batch, place) for p in phases])

    return evaluate
