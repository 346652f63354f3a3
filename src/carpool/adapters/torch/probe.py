"""One step of a structure on tensors without contents: what it returns, which parameters it reaches, what it saves.

Nothing is computed and nothing changes. A structure that needs contents (an `if` on a tensor, `.item()`) cannot be
probed; that is not an error here, it only cannot be stacked.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from carpool.adapters.torch.build import Built, Step
from carpool.errors import CarpoolError, described
from carpool.kernels.random import Keyed


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
    return functional_call(module, {f"model.{name}": leaf for name, leaf in leaves.items()}, (batch,))


@dataclass(frozen=True)
class Probe:
    """What one step showed; `failure` says why it showed nothing.

    `idle` parameters get no gradient; `random` says whether the step drew keyed random numbers.
    """

    values: tuple[str, ...] = ("loss",)
    idle: frozenset[str] = frozenset()
    saved_bytes: int = 0
    random: bool = True
    failure: str | None = None


def probe(built: Built) -> Probe:
    """Probes a job's structure; raises only for misuse, such as a loss that is not a scalar."""
    try:
        with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            return _probe(built, fake)
    except CarpoolError:
        raise
    except Exception as error:
        return Probe(failure=blame(error))


def _probe(built: Built, fake: FakeTensorMode) -> Probe:
    tensors = {**dict(built.model.named_parameters()), **dict(built.model.named_buffers())}
    leaves = {name: fake.from_tensor(tensor.detach()) for name, tensor in tensors.items()}
    learning = [name for name, parameter in built.model.named_parameters() if parameter.requires_grad]
    if not learning:
        return Probe(failure="no parameter is trained")
    for name in learning:
        leaves[name].requires_grad_()
    size = min(built.job.batch_size, built.data.length)
    device = next((str(tensor.device) for tensor in tensors.values()), "cpu")
    batch = built.data.batch(
        [torch.empty((size, *t.shape[1:]), dtype=t.dtype, device=device) for t in built.data.tensors]
    )
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), Keyed(0, 0) as key:
        values, _ = call(Stepped(built.model, built.step), leaves, batch)
    grads = torch.autograd.grad(values["loss"], [leaves[name] for name in learning], allow_unused=True)
    idle = frozenset(name for name, grad in zip(learning, grads, strict=True) if grad is None)
    return Probe(tuple(values), idle, sum(saved), key.call > 0)


def blame(error: BaseException) -> str:
    """An error in one line, with the user's own line that led to it."""
    line = _users_line(traceback.extract_tb(error.__traceback__))
    text = described(error)
    return text[:300] + (f" (at {line})" if line else "")


_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.__file__).parent)


def _users_line(frames: Sequence[traceback.FrameSummary]) -> str | None:
    for frame in reversed(frames):
        if not frame.filename.startswith((_OURS, _TORCHS, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return None
