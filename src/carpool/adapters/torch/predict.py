"""Predictions of many models: those of one structure in one launch a batch, what cannot be stacked one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from carpool.adapters.torch.faking import faked
from carpool.adapters.torch.inputs import Inputs, check_lengths, joined, read_inputs
from carpool.adapters.torch.predicting import Task, Ways, predicted
from carpool.adapters.torch.signature import model_signature
from carpool.adapters.torch.template import leaves_of, modes_kept, shared_names, template
from carpool.kernels.table import stacked
from carpool.memory import device as devices

_LARGEST_STACK_BYTES = 2 << 30  # weights and activations of one slice: wider ones gain no time
_SHARE_OF_FREE = 4
_STEPS = 300  # operators that a recurrent layer counts for
_LIVE_ACTIVATIONS = 4  # tensors of the largest one's size that a forward pass holds at a time, generously


class _NotStackable(Exception):
    """The stacked pass would leave something in the module, so it says nothing about its members."""


def predict(models: Sequence[nn.Module], value: Any, batch_size: int | None, device: str) -> list[Any]:
    """Each model's outputs in evaluation mode, on the device of the inputs."""
    inputs = read_inputs(value)
    if batch_size is not None:
        check_lengths(inputs)
    batches = list(inputs.batches(batch_size))
    distinct = list({id(model): model for model in models}.values())
    made: dict[int, _Outputs] = {}
    with torch.no_grad(), modes_kept(distinct):
        for model in distinct:
            model.eval()
        for group in _groups(distinct):
            outputs = _group_outputs(group, inputs, batches, device)
            made |= {id(model): own for model, own in zip(group, outputs, strict=True)}
    seen: set[int] = set()
    found: list[Any] = []
    for model in models:
        found.append(made[id(model)].whole(is_again=id(model) in seen))
        seen.add(id(model))
    return found


@dataclass(frozen=True)
class _Outputs:
    """What a model says, in parts, and how many samples each part is of."""

    parts: list[Any]
    sizes: list[int]
    is_own: bool = False
    """Whether no other model's outputs lie in the same memory, nor a model."""

    def whole(self, is_again: bool) -> Any:
        """The parts joined: in memory of their own, for each who asks."""
        if len(self.parts) > 1 or (self.is_own and not is_again):
            return joined(self.parts, self.sizes)
        return joined(pytree.tree_map_only(Tensor, Tensor.clone, self.parts), self.sizes)


def _groups(models: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Models that may be stacked, together; each of the others alone."""
    groups: dict[Any, list[nn.Module]] = {}
    for model in models:
        places = {leaf.device for leaf in leaves_of(model).values()}
        alone = len(places) != 1 or any(_has_hooks(part) for part in model.modules())
        key = id(model) if alone else (model_signature(model), places.pop())
        groups.setdefault(key, []).append(model)
    return list(groups.values())


def _has_hooks(module: nn.Module) -> bool:
    """A hook wants to see its own model's tensors, not those of a stack."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _group_outputs(
    models: Sequence[nn.Module], inputs: Inputs, batches: Sequence[Inputs], device: str
) -> list[_Outputs]:
    sizes = [batch.length for batch in batches]
    if len(models) == 1:
        return [_Outputs(_alone(models[0], batches, device), sizes)]
    look = cache(lambda: _looked_at(models[0], batches[0]))

    def plainly() -> list[list[Any]]:
        return _stacked(models, batches, device, _width(models, look().nbytes, device))

    if device != "cpu":
        return [_Outputs(parts, sizes) for parts in plainly()]
    made = predicted(Task(models, inputs, batches, look, _in_stacks(device), _in_turn(device), plainly))
    return [_Outputs(parts, made.sizes, made.is_own) for parts in made.parts]


def _in_stacks(device: str) -> Ways:
    return lambda models, batches: _together(models, batches, device)


def _in_turn(device: str) -> Ways:
    return lambda models, batches: [_alone(model, batches, device) for model in models]


def _stacked(
    models: Sequence[nn.Module], batches: Sequence[Inputs], device: str, width: int
) -> list[list[Any]]:
    """For each model its outputs batch by batch, so many models in a launch."""
    made: list[list[Any]] = []
    while len(made) < len(models):
        part = models[len(made) : len(made) + width]
        try:
            made += _together(part, batches, device) if len(part) > 1 else [_alone(part[0], batches, device)]
        except torch.OutOfMemoryError:
            if width == 1:
                raise
            width = width // 2
        except (
            Exception
        ):  # whatever a stack cannot do, the models alone can; their own errors come back there
            if width == 1:
                raise
            made += [_alone(model, batches, device) for model in part]
            width = 1
    return made


# Together


def _together(models: Sequence[nn.Module], batches: Sequence[Inputs], device: str) -> list[list[Any]]:
    bare = template(models[0])
    before = model_signature(bare)
    common, own = _leaves(models, device)
    buffers = [name for name, _ in bare.named_buffers()]
    made: list[list[Any]] = [[] for _ in models]
    for batch in batches:
        arguments, keywords = batch.on(device).arguments()

        once = _fresh(common, buffers)

        def member(
            leaves: Mapping[str, Tensor], given: Any = arguments, named: Any = keywords, once: Any = once
        ) -> Any:
            return functional_call(bare, {**leaves, **once}, given, named)

        with stacked(0, 0):
            leaves, nest = pytree.tree_flatten(vmap(member)(_fresh(own, buffers)))
        home = [leaf.to(batch.device) for leaf in leaves]
        for place, outputs in enumerate(made):
            outputs.append(pytree.tree_unflatten([leaf[place] for leaf in home], nest))
    if model_signature(bare) != before:
        raise _NotStackable
    return made


def _leaves(models: Sequence[nn.Module], device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What all models share, once, and what is each one's own, stacked: where they are, then moved in one copy."""
    shared = shared_names(models)
    members = [leaves_of(model) for model in models]
    common = {name: leaf.detach().to(device) for name, leaf in members[0].items() if name in shared}
    own = {
        name: torch.stack([member[name].detach() for member in members]).to(device)
        for name in members[0]
        if name not in shared
    }
    return common, own


def _fresh(leaves: Mapping[str, Tensor], buffers: Sequence[str]) -> dict[str, Tensor]:
    """Buffers copied: what a forward pass writes into them is for no other batch to see."""
    return {**leaves, **{name: leaves[name].clone() for name in buffers if name in leaves}}


def _width(models: Sequence[nn.Module], largest_bytes: int, device: str) -> int:
    """How many members to stack at a time, by their weights and the largest tensor that a forward pass makes."""
    shared = shared_names(models)
    own_bytes = sum(leaf.nbytes for name, leaf in leaves_of(models[0]).items() if name not in shared)
    member_bytes = own_bytes + _LIVE_ACTIVATIONS * largest_bytes
    room = min(_LARGEST_STACK_BYTES, devices.read(device).free_bytes // _SHARE_OF_FREE)
    return max(1, min(len(models), room // max(1, member_bytes)))


def _looked_at(model: nn.Module, batch: Inputs) -> _Seen:
    """A forward pass, seen on tensors without contents."""
    seen = _Seen()
    try:
        with _disable_current_modes(), faked() as fake, seen:
            empty = Inputs(
                tuple(fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf for leaf in batch.leaves),
                batch.nest,
            )
            leaves: dict[str, Tensor] = {
                name: fake.from_tensor(leaf.detach()) for name, leaf in leaves_of(model).items()
            }
            functional_call(template(model), leaves, *empty.arguments())
            recurrent = sum(isinstance(part, nn.RNNBase) for part in model.modules())
            seen.operators += recurrent * _STEPS
            return seen
    except Exception:  # what needs contents cannot be seen so; it will not be stacked either
        return _Seen()


class _Seen(TorchDispatchMode):
    """Notes the largest tensor that any operator makes, and how many operators there are."""

    nbytes = 0
    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.nbytes for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
        self.nbytes = max(self.nbytes, *sizes, 0)
        self.operators += 1
        return made


# In turn


def _alone(model: nn.Module, batches: Sequence[Inputs], device: str) -> list[Any]:
    leaves = leaves_of(model)
    away = {leaf.device for leaf in leaves.values()} - {torch.device(device)}
    if away:
        try:
            moved = {name: leaf.detach().to(device) for name, leaf in leaves.items()}
            buffers = [name for name, _ in model.named_buffers()]
            return [
                _home(functional_call(model, _fresh(moved, buffers), *batch.on(device).arguments()), batch)
                for batch in batches
            ]
        except Exception:  # a tensor it holds besides parameters and buffers stayed where the model is
            device = str(next(iter(leaves.values())).device)
    return [_home(_called(model, batch.on(device)), batch) for batch in batches]


def _called(model: nn.Module, batch: Inputs) -> Any:
    """The model itself, its buffers left as they are."""
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    arguments, keywords = batch.arguments()
    outputs = model(*arguments, **keywords)
    for buffer, version, before in buffers:
        if buffer._version != version:
            buffer.copy_(before)
    return outputs


def _home(outputs: Any, batch: Inputs) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(batch.device), outputs)
