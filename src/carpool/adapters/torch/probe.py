"""One step of a structure on tensors without contents: what it returns, which parameters it reaches, what it saves.

Nothing is computed and nothing changes. A structure that needs contents (an `if` on a tensor, `.item()`) cannot be
probed; that is not an error here, it only cannot be stacked.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from carpool.adapters.torch.blame import blame
from carpool.adapters.torch.build import Arrays, Built, Step
from carpool.adapters.torch.faking import faked
from carpool.adapters.torch.phases import combined
from carpool.adapters.torch.work import Convolved
from carpool.ambient import drawn, seeded
from carpool.errors import CarpoolError, failure
from carpool.kernels.recurrent import lent
from carpool.kernels.refusal import Unstackable as Refused
from carpool.kernels.table import stacked

Entries = Sequence[tuple[str, Hashable]]

_REMEMBERED = 128
_memory: OrderedDict[Hashable, Probe] = OrderedDict()
"""What was seen in this process, as traces are remembered: by structure, shapes and settings."""


class Stepped(nn.Module):
    """A model with its objective as a forward, so that `functional_call` can run it on other tensors.

    It returns the values and the buffers as they are afterwards, whether they were changed in place or replaced.
    """

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model = model
        self.step = step

    def forward(self, batch: Any, place: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        values = self.step(self.model, batch, place)
        return values, dict(self.model.named_buffers())


def call(module: Stepped, leaves: Mapping[str, torch.Tensor], batch: Any, place: Any) -> Any:
    """Runs the objective on these parameters and buffers, named as in the user's model."""
    with lent(module):
        return functional_call(
            module, {f"model.{name}": leaf for name, leaf in leaves.items()}, (batch, place)
        )


@dataclass(frozen=True)
class Probe:
    """What one step showed; `failure` says why it showed nothing.

    `values` is what each phase returns for a training batch, its loss first, `evaluated` what a validation batch gives.
    `idle` parameters get no gradient; `random` says whether the step drew keyed random numbers.
    """

    values: tuple[tuple[str, ...], ...] = (("loss",),)
    evaluated: tuple[str, ...] = ("loss",)
    reach: Callable[[], frozenset[str]] = frozenset
    saved_bytes: int = 0
    random: bool = True
    is_ambient: bool = True
    """Whether the step draws from the process's generators, or may."""
    failure: str | None = None
    convolved: int = 0
    """Floating-point operations in convolutions, of a forward pass."""

    @cached_property
    def idle(self) -> frozenset[str]:
        """The parameters that get no gradient. Asked for by stacks only, since it takes as long as all the rest."""
        return self.reach()


def remembered(key: Hashable) -> Probe | None:
    """What an earlier run has kept under this key."""
    found = _memory.pop(key, None)
    if found is not None:
        _memory[key] = found
    return found


def remember(key: Hashable, shown: Probe) -> None:
    """Keeps what a stack has asked about for later runs, without the model and the data that it was seen on.

    Nothing is kept of a step that could not be probed: what was in its way may be gone.
    """
    if shown.failure is not None or "idle" not in vars(shown):
        return
    idle = shown.idle
    _memory.pop(key, None)
    _memory[key] = replace(shown, reach=lambda: idle)
    while len(_memory) > _REMEMBERED:
        _memory.popitem(last=False)


def seen_on(built: Built) -> Hashable:
    """What a probe depends on beside the job's signature."""
    device = next((str(tensor.device) for tensor in built.model.parameters()), "cpu")
    arrays = [built.data, *([built.validation] if built.validation is not None else ())]
    return device, tuple(min(built.job.batch_size, one.length) for one in arrays)


def probe(built: Built, behaviour: Callable[[Built], Entries]) -> Probe:
    """Probes a job's structure; raises only for misuse, such as a loss that is not a scalar.

    It runs on a copy, so that what a forward pass leaves in its module is not left in the user's. `behaviour` tells
    whether it did leave something: such a step depends on the steps before it, and one trace cannot stand for all.
    """
    if built.manual is not None:
        return Probe(failure="automatic_optimization is False: its training_step updates by itself")
    try:
        twin = replace(built, model=_twin(built.model))
        before = behaviour(twin)
        with seeded(built.seed), drawn() as generators, torch.enable_grad(), faked() as fake:
            held = [_held(built, number) for number in range(len(built.phases))]
            shown = _probe(twin, fake, held)
        changed = _changed(before, behaviour(twin))
        shown = replace(shown, is_ambient=bool(generators))
        if generators:
            return replace(shown, failure=f"its step draws from the global generator of {generators[0]!r}")
        return shown if changed is None else replace(shown, failure=f"its forward pass changes {changed!r}")
    except CarpoolError:
        raise
    except BaseException as error:
        failure(error)
        return Probe(failure=blame(error))


def _twin(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers, which the step never sees: it runs on others, without contents."""
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, held)


def _changed(before: Entries, after: Entries) -> str | None:
    was, now = dict(before), dict(after)
    return next((label for label in (*was, *now) if was.get(label, was) != now.get(label, now)), None)


def _held(built: Built, number: int) -> frozenset[str]:
    """The parameters that get a gradient of a phase's loss: those of its optimizer, or all for a plain job."""
    phase = built.phases[number]
    held = {id(parameter) for parameter in phase.trained}
    learning = {name: p for name, p in built.model.named_parameters() if p.requires_grad}
    return frozenset(name for name, p in learning.items() if not phase.name or id(p) in held)


def _probe(built: Built, fake: FakeTensorMode, held: Sequence[frozenset[str]]) -> Probe:
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
    batch = _empty_batch(built.data, built.job.batch_size, device)
    shown = [
        _probe_phase(built, fake, number, leaves, sorted(names), batch) for number, names in enumerate(held)
    ]
    combined(built.job, (), [dict.fromkeys(one.values, 0) for one in shown])  # a name that comes twice raises
    written = next((name for name, version in versions.items() if leaves[name]._version != version), None)
    return Probe(
        values=tuple(one.values for one in shown),
        evaluated=_evaluated_values(built, leaves, device),
        reach=lambda: frozenset().union(*(one.reach() for one in shown)),
        saved_bytes=max(one.saved_bytes for one in shown),
        random=any(one.random for one in shown),
        convolved=sum(one.convolved for one in shown),
        failure=None if written is None else f"its forward pass writes into the parameter {written!r}",
    )


@dataclass(frozen=True)
class _Shown:
    """What one phase showed."""

    values: tuple[str, ...]
    reach: Callable[[], frozenset[str]]
    saved_bytes: int
    random: bool
    convolved: int


def _probe_phase(
    built: Built,
    fake: FakeTensorMode,
    number: int,
    leaves: Mapping[str, torch.Tensor],
    learning: Sequence[str],
    batch: Any,
) -> _Shown:
    phase = built.phases[number]
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, stacked(0, 0, number) as key, Convolved() as work:
        values, _ = call(Stepped(built.model, phase.step), leaves, batch, _empty_place())

    def reach() -> frozenset[str]:
        with torch.enable_grad(), fake:
            wanted = [leaves[name] for name in learning]
            grads = torch.autograd.grad(values[phase.loss], wanted, allow_unused=True)
        return frozenset(name for name, grad in zip(learning, grads, strict=True) if grad is None)

    return _Shown(_loss_first(values, phase.loss), reach, sum(saved), key.drawn, work.flops)


def _empty_place() -> torch.Tensor:
    """The number of a batch, without contents."""
    return torch.empty((), dtype=torch.int64)


def _evaluated_values(built: Built, leaves: Mapping[str, torch.Tensor], device: str) -> tuple[str, ...]:
    """What a validation batch returns: a step may return other metrics in evaluation mode."""
    if built.validation is None:
        return ("loss",)
    module = Stepped(built.model, built.evaluate)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), stacked(0, 0):
            batch = _empty_batch(built.validation, built.job.batch_size, device)
            before = {name: leaf._version for name, leaf in leaves.items()}
            values, after = call(module, leaves, batch, _empty_place())
            written = (n for n, b in after.items() if b is not leaves[n] or b._version != before[n])
            if (name := next(written, None)) is not None:
                raise Refused(f"validation writes into the buffer {name!r}")
    finally:
        for part, training in modes.items():
            part.training = training
    return _loss_first(values, "loss")


def _empty_batch(arrays: Arrays, size: int, device: str) -> Any:
    count = min(size, arrays.length)
    return arrays.batch(
        [torch.empty((count, *t.shape[1:]), dtype=t.dtype, device=device) for t in arrays.tensors]
    )


def _loss_first(values: Mapping[str, Any], loss: str) -> tuple[str, ...]:
    return (*(name for name in values if name == loss), *(name for name in values if name != loss))
