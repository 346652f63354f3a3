"""Torch's fused optimizer kernels on a CPU, lent to a job's own optimizer while its steps run.

They compute what the default does, to rounding, in one call instead of a dozen for each parameter: for small models that is a
third of a step. Only where the user left the choice to torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

_KINDS = (SGD, Adam, AdamW)


Groups = list[dict[str, Any]]


@contextmanager
def quickened(optimizers: Sequence[Optimizer]) -> Iterator[Groups]:
    """The optimizers that can use fused kernels do inside; their options are what they were outside. Gives the groups that do."""
    plain = [one for one in optimizers if type(one) in _KINDS]
    groups = [group for one in plain for group in one.param_groups if _fits(one, group)]
    for group in groups:
        group["fused"] = True
    try:
        yield groups
    finally:
        for group in groups:
            group["fused"] = None


def step(optimizer: Optimizer, lent: Groups) -> None:
    """A step by the kernels that are lent, or by torch's default where they cannot take it."""
    plain = [group for group in lent if _is_uneven(optimizer, group)]
    for group in plain:
        group["fused"] = None
    try:
        optimizer.step()
    finally:
        for group in plain:
            group["fused"] = True


def _is_uneven(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """SGD's kernel wants a momentum of every gradient, or of none: one that comes later than others has none yet."""
    if not group.get("momentum") or not any(group is one for one in optimizer.param_groups):
        return False
    learning = [parameter for parameter in group["params"] if parameter.grad is not None]
    begun = sum(optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in learning)
    return 0 < begun < len(learning)


def can_quicken(model: nn.Module) -> bool:
    """Whether a model's gradients are such as fused kernels take: none of them sparse."""
    return not any(getattr(module, "sparse", False) for module in model.modules())


def _fits(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return (
        group.get("fused", False) is None
        and group.get("foreach", False) is None
        and not group.get("capturable")
        and not group.get("differentiable")
        and not isinstance(group["lr"], Tensor)
        and torch.get_default_dtype()
        == torch.float32  # the type of a fused optimizer's "step", whatever the default
        and all(_is_plain(parameter, optimizer.state.get(parameter, {})) for parameter in group["params"])
    )


def _is_plain(parameter: Tensor, state: dict[str, Any]) -> bool:
    """The kernels go through memory from its start: a tensor must be dense, and its state laid out as it is."""
    slots = [slot for slot in state.values() if isinstance(slot, Tensor) and slot.shape == parameter.shape]
    return (
        parameter.device.type == "cpu"
        and parameter.dtype in (torch.float32, torch.float64)
        and torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        and all(slot.stride() == parameter.stride() for slot in slots)
    )
