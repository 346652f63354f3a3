"""A module's weights and an optimizer's state as arrays of no framework, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from carpool.adapters.matching import matched
from carpool.arrays import Array


def weights(model: nn.Module) -> dict[str, Array]:
    """The tensors of its `state_dict`. What is one tensor under several names is one array."""
    found: dict[tuple[Any, ...], Array] = {}
    named: dict[str, Array] = {}
    for name, tensor in _tensors(model).items():
        place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype)
        key = place if tensor.numel() else (name,)
        if key not in found:
            found[key] = array_of(tensor)
        named[name] = found[key]
    return named


def load_weights(model: nn.Module, arrays: Mapping[str, Array]) -> nn.Module:
    """Raises ModelError where names or shapes are others."""
    own = _tensors(model)
    found = matched({name: tuple(tensor.shape) for name, tensor in own.items()}, arrays)
    model.load_state_dict({**model.state_dict(), **{name: tensor_of(array) for name, array in found.items()}})
    return model


def optimizer_state(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Their `state_dict`s; of several (phases), a tuple of them."""
    return {
        "optimizer": _mapped(_told(optimizer), array_of),
        "scheduler": _mapped(_told(scheduler), array_of),
    }


def load_optimizer(optimizer: Any, scheduler: Any, state: Mapping[str, Any]) -> Any:
    for thing, word in ((optimizer, "optimizer"), (scheduler, "scheduler")):
        if thing is None:
            continue
        parts, held = (thing, state[word]) if isinstance(thing, tuple) else ((thing,), (state[word],))
        for part, own in zip(parts, held, strict=True):
            if part is not None and own is not None:
                part.load_state_dict(_mapped(own, None))
    return optimizer


def array_of(tensor: torch.Tensor) -> Array:
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Array.named(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def tensor_of(array: Array) -> torch.Tensor:
    dtype = getattr(torch, array.name)
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: held for name, held in model.state_dict().items() if isinstance(held, torch.Tensor)}


def _told(thing: Any) -> Any:
    if isinstance(thing, tuple):
        return tuple(_told(part) for part in thing)
    return None if thing is None else thing.state_dict()


def _mapped(nest: Any, change: Any) -> Any:
    """The nest with arrays for tensors, or the other way round."""
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if isinstance(nest, Array):
        return tensor_of(nest)
    if isinstance(nest, Mapping):
        return {key: _mapped(value, change) for key, value in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(_mapped(value, change) for value in nest)
    return nest
