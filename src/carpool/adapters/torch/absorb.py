"""States into live objects: the user's model, optimizer and scheduler as a run alone would have left them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from carpool.adapters.base import JobState
from carpool.adapters.torch.build import Built
from carpool.kernels.updates import UPDATES


def restore_into(built: Built, state: JobState) -> None:
    """Writes optimizer groups and scheduler state; weights and slots go where the session keeps them."""
    restore_groups(built, state.groups)
    if built.timer is not None and state.scheduler is not None:
        built.timer.scheduler.load_state_dict(dict(state.scheduler))


def absorb_into(built: Built, state: JobState) -> None:
    """Writes a whole state into the user's own objects, where they are."""
    leaves = {**dict(built.model.named_parameters()), **dict(built.model.named_buffers())}
    with torch.no_grad():
        for name, value in state.model.items():
            if leaves[name].data_ptr() != value.data_ptr() or leaves[name].numel() == 0:
                leaves[name].copy_(value)
    for name, slots in state.optimizer.items():
        parameter = leaves[name]
        built.optimizer.state[parameter] = {
            slot: _owned(slot, value, parameter, built) for slot, value in slots.items()
        }
    restore_into(built, state)
    built.optimizer.zero_grad(set_to_none=True)  # gradients from before the run belong to other weights


def _owned(slot: str, value: Any, parameter: torch.Tensor, built: Built) -> Any:
    """A slot on the parameter's device; torch keeps numbers on the host unless the optimizer is capturable or fused."""
    if not isinstance(value, torch.Tensor):
        return value
    on_device = any(g.get("capturable") or g.get("fused") for g in built.optimizer.param_groups)
    if is_number(built.optimizer, slot) and not on_device:
        return value.clone()
    return value.detach().clone().to(parameter.device)


def is_number(optimizer: torch.optim.Optimizer, slot: str) -> bool:
    """Whether a slot is one number for each parameter: a count or a tally."""
    update = UPDATES.get(type(optimizer))
    return slot == "step" or (update is not None and slot in dict(update.tallies))


def group_options(built: Built) -> tuple[Mapping[str, Any], ...]:
    """The optimizer's groups without their parameters."""
    return tuple(
        {key: value for key, value in group.items() if key != "params"}
        for group in built.optimizer.param_groups
    )


def restore_groups(built: Built, groups: Sequence[Mapping[str, Any]]) -> None:
    """Puts hyper-parameters back; groups given as an empty tuple stay as they are."""
    for group, options in zip(built.optimizer.param_groups, groups, strict=False):
        group.update(options)
