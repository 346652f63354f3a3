"""States into live objects: the user's model, optimizer and scheduler as a run alone would have left them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from carpool.adapters.base import JobState
from carpool.adapters.torch.build import Built, LivePhase
from carpool.adapters.torch.transfer import landed
from carpool.kernels.updates import UPDATES


def restore_into(built: Built, state: JobState) -> None:
    """Writes optimizer groups and scheduler state; weights and slots go where the session keeps them."""
    restore_groups(built, state.groups)
    if state.scheduler is not None:
        restore_schedulers(built, state.scheduler)


def absorb_into(built: Built, state: JobState) -> None:
    """Writes a whole state into the user's own objects, where they are."""
    parameters = dict(built.model.named_parameters())
    leaves = {**parameters, **dict(built.model.named_buffers())}
    with torch.no_grad():
        for name, value in state.model.items():
            leaf = leaves[name]
            if leaf.data_ptr() != value.data_ptr() or leaf.numel() == 0:
                leaf.copy_(value)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for phase in built.phases:
        _absorb_slots(phase, names, state)
        phase.optimizer.zero_grad(set_to_none=True)  # gradients from before the run belong to other weights
    restore_into(built, state)


def _absorb_slots(phase: LivePhase, names: Mapping[int, str], state: JobState) -> None:
    optimizer = phase.optimizer
    on_device = any(g.get("capturable") or g.get("fused") for g in optimizer.param_groups)
    numbers = _numbers(optimizer)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        slots = state.optimizer.get(phase.key(names[id(parameter)]))
        if slots is not None and slots is not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                slot: _owned(value, parameter, slot in numbers and not on_device)
                for slot, value in slots.items()
            }


def on_host(state: JobState) -> JobState:
    """The state with what is on a device copied to the host; what is there already is not copied."""

    def here(value: Any) -> Any:
        return landed(value) if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value

    model = {name: here(value) for name, value in state.model.items()}
    slots = {key: {slot: here(value) for slot, value in own.items()} for key, own in state.optimizer.items()}
    return replace(state, model=model, optimizer=slots)


def _owned(value: Any, parameter: torch.Tensor, stays: bool) -> Any:
    """A slot on the parameter's device, unless it `stays` on the host: torch keeps numbers there if the optimizer is neither capturable nor fused."""
    if not isinstance(value, torch.Tensor):
        return value
    if stays:
        return value.clone()
    if value.shape == parameter.shape:  # laid out as a run alone would have left it
        if value.device == parameter.device and value.stride() == parameter.stride():
            return value.detach().clone()
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value.detach())
    return value.detach().clone().to(parameter.device)


def is_number(optimizer: torch.optim.Optimizer, slot: str) -> bool:
    """Whether a slot is one number for each parameter: a count or a tally."""
    return slot in _numbers(optimizer)


def _numbers(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    update = UPDATES.get(type(optimizer))
    return frozenset(("step", *(name for name, _ in update.tallies))) if update else frozenset(("step",))


def group_options(built: Built) -> tuple[Mapping[str, Any], ...]:
    """The optimizers' groups without their parameters, phase after phase."""
    return tuple({key: value for key, value in group.items() if key != "params"} for group in _groups(built))


def _groups(built: Built) -> list[dict[str, Any]]:
    return [group for phase in built.phases for group in phase.optimizer.param_groups]


def slots_by_key(built: Built) -> dict[str, Mapping[str, Any]]:
    """What the optimizers keep for each leaf (no copies are made)."""
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}
    return {
        phase.key(names[id(parameter)]): slots
        for phase in built.phases
        for parameter, slots in phase.optimizer.state.items()
        if slots and id(parameter) in names
    }


def scheduler_state(built: Built) -> dict[str, Any] | None:
    """The scheduler's state; with phases, each phase's by its name."""
    states = {p.name: p.timer.scheduler.state_dict() for p in built.phases if p.timer is not None}
    return states.get("", states) if states else None


def restore_schedulers(built: Built, state: Mapping[str, Any]) -> None:
    """Puts what `scheduler_state` gave back."""
    for phase in built.phases:
        own = state.get(phase.name) if phase.name else state
        if phase.timer is not None and own is not None:
            phase.timer.scheduler.load_state_dict(dict(own))


def restore_groups(built: Built, groups: Sequence[Mapping[str, Any]]) -> None:
    """Puts hyper-parameters back; groups given as an empty tuple stay as they are."""
    for group, options in zip(_groups(built), groups, strict=False):
        group.update(options)
