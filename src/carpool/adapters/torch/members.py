"""The members of a stack that steps in the user's own loop: models and optimizers, checked to be of one structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from carpool.adapters.torch.behaviour import optimizer_signature
from carpool.adapters.torch.build import Arrays, Built, LivePhase, Step, in_precision
from carpool.adapters.torch.fuse import Known, untraced_refusal
from carpool.adapters.torch.probe import Probe
from carpool.adapters.torch.signature import model_signature
from carpool.adapters.torch.template import leaves_of, shared_names
from carpool.errors import DeviceError, FusionError, ModelError, OptimizerError, sentence
from carpool.job import Job
from carpool.planning.cursor import Course
from carpool.planning.spec import ModelSpec, Signature, difference

_NOTHING = Arrays((), None)
_ONCE = Course(1, 1, 1)


@dataclass(frozen=True)
class Members:
    """Models of one structure with their optimizers; `shared` names the tensors that are one object in all of them."""

    built: tuple[Built, ...]
    signature: Signature
    shared: frozenset[str]
    device: str
    modes: tuple[tuple[nn.Module, bool], ...]

    def refusal(self, probe: Probe, clip_norm: float | None = None) -> str | None:
        """Why they cannot be stacked, given what a probe of their step has shown."""
        known = [
            Known(replace(b, job=replace(b.job, clip_norm=clip_norm)), probe, self.signature, _ONCE)
            for b in self.built
        ]
        return untraced_refusal(known)


def make_members(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], seeds: Sequence[int]
) -> Members:
    """The members of a stack; raises what keeps them from being one."""
    for position, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        _check_pair(position, model, optimizer)
    built = tuple(
        _member(position, *parts)
        for position, parts in enumerate(zip(models, optimizers, seeds, strict=True))
    )
    _check_owned(built)
    signatures = [(*model_signature(b.model), *optimizer_signature(b)) for b in built]
    _check_equal(built, signatures)
    members = Members(
        built,
        signatures[0],
        shared_names(models) if len(models) > 1 else frozenset(),
        _device(built),
        tuple((part, part.training) for model in models for part in model.modules()),
    )
    if reason := members.refusal(Probe()):
        raise FusionError(sentence("models and optimizers that can be stacked", reason, "see docs/fusing.md"))
    return members


def _check_pair(position: int, model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(
            sentence(
                "a torch.nn.Module for every member",
                f"{type(model).__name__} at position {position}",
                "pass the models themselves",
            )
        )
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            sentence(
                "a torch optimizer for every model",
                f"{type(optimizer).__name__} at position {position}",
                "pass the optimizers themselves",
            )
        )
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise OptimizerError(
            sentence(
                f"optimizer {position} to hold parameters of model {position} only",
                f"{foreign} parameters that are not that model's",
                "pass the optimizers in the order of the models",
            )
        )


def _member(position: int, model: nn.Module, optimizer: Optimizer, seed: int) -> Built:
    job = Job(model, (), name=f"model {position}", optimizer=optimizer, seed=seed, batch_size=1)
    return Built(job, model, (LivePhase("", _no_step, optimizer, None),), _NOTHING, None, _no_step)


def _no_step(model: nn.Module, batch: Any, place: Any) -> dict[str, Tensor]:
    raise AssertionError("a member's step comes with its batch")


def stepping(member: Built, step: Step, data: Arrays) -> Built:
    """The member with what it is to compute, in its precision, and on what."""
    (phase,) = member.phases
    return replace(member, phases=(replace(phase, step=in_precision(member.job, step)),), data=data)


def _check_owned(built: Sequence[Built]) -> None:
    owners: dict[int, int] = {}
    for position, member in enumerate(built):
        (phase,) = member.phases
        for thing in (member.model, phase.optimizer, *{id(p): p for p in phase.trained}.values()):
            other = owners.setdefault(id(thing), position)
            if other != position:
                raise ModelError(
                    sentence(
                        "every member to have a model, an optimizer and trained parameters of its own",
                        f"one {type(thing).__name__} in models {other} and {position}",
                        "copy it, or freeze what they are to share",
                    )
                )


def _check_equal(built: Sequence[Built], signatures: Sequence[Signature]) -> None:
    specs = [
        ModelSpec(str(b.job.name), "torch", signature, _ONCE, 0, 0)
        for b, signature in zip(built, signatures, strict=True)
    ]
    for spec in specs[1:]:
        if found := difference(specs[0], spec):
            raise FusionError(
                sentence(
                    "models and optimizers of one structure",
                    f"{spec.name} differs from {specs[0].name}: {found}",
                    "align them, or make one Stack for each structure",
                )
            )


def _device(built: Sequence[Built]) -> str:
    places = {leaf.device for member in built for leaf in leaves_of(member.model).values()}
    if len(places) > 1:
        raise DeviceError(
            sentence(
                "all models on one device",
                ", ".join(sorted(map(str, places))),
                "move them with model.to(device) before their optimizers are made",
            )
        )
    return str(next(iter(places), torch.device("cpu")))
