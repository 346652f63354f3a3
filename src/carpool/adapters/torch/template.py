"""What models of one structure share: a copy without memory to run on other tensors, modes, tensors that are one object."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def template(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers hold no memory: `functional_call` brings others. Ties are kept."""
    empty: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                empty[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for buffer in module._buffers.values():
            if buffer is not None:
                empty[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, empty)


def leaves_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers by name, one that has two names once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def shared_names(models: Sequence[nn.Module]) -> frozenset[str]:
    """The parameters and buffers that are one object in all models, as those of a trunk they share."""
    first, *others = (leaves_of(model) for model in models)
    return frozenset(name for name, leaf in first.items() if all(leaf is other[name] for other in others))


@contextmanager
def modes_kept(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, modes may be changed; afterwards every module is in the mode it was in."""
    before = [(part, part.training) for model in models for part in model.modules()]
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
