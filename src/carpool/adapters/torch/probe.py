"""One step of a structure on tensors without contents: what it returns, which parameters it reaches, what it saves.

Nothing is computed and nothing changes. A structure that needs contents (an `if` on a tensor, `.item()`) cannot be
probed; that is not an error here, it only cannot be stacked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from carpool.adapters.torch.blame import blame
from carpool.adapters.torch.build import Arrays, Built, Step
from carpool.errors import CarpoolError
from carpool.kernels.recurrent import lent
from carpool.kernels.table import stacked

Entries = Sequence[tuple[str, Hashable]]


class Stepped(nn.Module):
    """A model with its objective as a forward, so that `functional_call` can run it on other tensors.

    It returns the values and the buffers as they are afterwards, whether they were changed in place or replaced.
    """

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model = model
        self.step = step

    def forward(self, batch: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        values = self.step(self.model, batch)
        return values, dict(self.model.named_buffers())


def call(module: Stepped, leaves: Mapping[str, torch.Tensor], batch: Any) -> Any:
    """Runs the objective on these parameters and buffers, named as in the user's model."""
    with lent(module):
        return functional_call(module, {f"model.{name}": leaf for name, leaf in leaves.items()}, (batch,))


@dataclass(frozen=True)
class Probe:
    """What one step showed; `failure` says why it showed nothing.

    `values` and `evaluated` are what a training and a validation batch return, the loss first. `idle` parameters get no
    gradient; `random` says whether the step drew keyed random numbers.
    """

    values: tuple[str, ...] = ("loss",)
    evaluated: tuple[str, ...] = ("loss",)
    idle: frozenset[str] = frozenset()
    saved_bytes: int = 0
    random: bool = True
    failure: str | None = None


def probe(built: Built, behaviour: Callable[[Built], Entries]) -> Probe:
    """Probes a job's structure; raises only for misuse, such as a loss that is not a scalar.

    It runs on a copy, so that what a forward pass leaves in its module is not left in the user's. `behaviour` tells
    whether it did leave something: such a step depends on the steps before it, and one trace cannot stand for all.
    """
    try:
        twin = replace(built, model=copy.deepcopy(built.model))
        before = behaviour(twin)
        with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            shown = _probe(twin, fake)
        changed = _changed(before, behaviour(twin))
        return shown if changed is None else replace(shown, failure=f"its forward pass changes {changed!r}")
    except CarpoolError:
        raise
    except Exception as error:
        return Probe(failure=blame(error))


def _changed(before: Entries, after: Entries) -> str | None:
    was, now = dict(before), dict(after)
    return next((label for label in (*was, *now) if was.get(label, was) != now.get(label, now)), None)


def _probe(built: Built, fake: FakeTensorMode) -> Probe:
    parameters = dict(built.model.named_parameters())
    tensors = {**parameters, **dict(built.model.named_buffers())}
    leaves = {name: fake.from_tensor(tensor.detach()) for name, tensor in tensors.items()}
    learning = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not learning:
        return Probe(failure="no parameter is trained")
    for name in learning:
        leaves[name].requires_grad_()
    versions = {name: leaves[name]._version for name in parameters}
    device = next((str(tensor.device) for tensor in tensors.values()), "cpu")
    module = Stepped(built.model, built.step)
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), stacked(0, 0) as key:
        values, _ = call(module, leaves, _empty_batch(built.data, built.job.batch_size, device))
    grads = torch.autograd.grad(values["loss"], [leaves[name] for name in learning], allow_unused=True)
    idle = frozenset(name for name, grad in zip(learning, grads, strict=True) if grad is None)
    written = next((name for name, version in versions.items() if leaves[name]._version != version), None)
    failure = None if written is None else f"its forward pass writes into the parameter {written!r}"
    evaluated = _evaluated_values(built, module, leaves, device)
    return Probe(_loss_first(values), evaluated, idle, sum(saved), key.call > 0, failure)


def _evaluated_values(
    built: Built, module: Stepped, leaves: Mapping[str, torch.Tensor], device: str
) -> tuple[str, ...]:
    """What a validation batch returns: a step may return other metrics in evaluation mode."""
    if built.validation is None:
        return ("loss",)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), stacked(0, 0):
            values, _ = call(module, leaves, _empty_batch(built.validation, built.job.batch_size, device))
    finally:
        for part, training in modes.items():
            part.training = training
    return _loss_first(values)


def _empty_batch(arrays: Arrays, size: int, device: str) -> Any:
    count = min(size, arrays.length)
    return arrays.batch(
        [torch.empty((count, *t.shape[1:]), dtype=t.dtype, device=device) for t in arrays.tensors]
    )


def _loss_first(values: Mapping[str, Any]) -> tuple[str, ...]:
    return ("loss", *(name for name in values if name != "loss"))
