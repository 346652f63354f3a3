"""How fast a structure steps together and alone, measured on copies; and by what it is known in another run."""

from __future__ import annotations

import copy
import hashlib
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from carpool.adapters.torch.check import Case, twin_optimizer
from carpool.adapters.torch.precision import untouched
from carpool.adapters.torch.quick import quickened
from carpool.adapters.torch.stacked import Recipe
from carpool.kernels.table import alone

if TYPE_CHECKING:
    from carpool.adapters.torch.fuse import Known

_VERSION = 3  # of how a stack steps (2: on all threads): what was measured of another one is measured anew
_TRIES = 3
_LONG_S = 0.2


def alone_step(recipe: Recipe, case: Case, random: bool) -> Callable[[], float]:
    """A member's step as a job alone would take it, on a copy of its model: each call returns its seconds."""
    built = case.built
    device = case.tensors["weights"].device
    model = copy.deepcopy(built.model).to(device)
    leaves = dict(model.named_parameters())
    optimizers = [
        twin_optimizer(recipe, case, number, {name: leaves[name] for name in recipe.layout.names_of(number)})
        for number in range(len(built.phases))
    ]
    quick = optimizers if device.type == "cpu" else []
    batch = built.data.batch(list(case.data))

    def step_s() -> float:
        _finish(device)
        started = time.perf_counter()
        for number, (phase, optimizer) in enumerate(zip(built.phases, optimizers, strict=True)):
            with alone(built.seed, case.step, number) if random else nullcontext():
                values = phase.step(model, batch, case.place)
            values[phase.loss].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        _finish(device)
        return time.perf_counter() - started

    def timed() -> float:
        with torch.enable_grad(), untouched(recipe.precision, device.type), quickened(quick):
            return step_s()

    return timed


def _finish(device: torch.device) -> None:
    """Waits for the device, where there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def shortest(measure: Callable[[], float]) -> float:
    """The shortest of a few measurements; of long ones there is less to gain by trying again."""
    found = measure()
    for _ in range(_TRIES - 1):
        if found > _LONG_S:
            break
        found = min(found, measure())
    return found


def _machine(device: str) -> tuple[object, ...]:
    if device.startswith("cuda"):
        return (torch.cuda.get_device_name(device),)
    return (torch.get_num_threads(), platform.machine(), platform.processor())


def pace_key(known: Known, width: int, device: str) -> str:
    """What decides how fast a stack of this structure steps: shapes, layers, optimizer, width, and the machine."""
    built = known.built
    parts = [
        [(type(module).__qualname__, module.extra_repr()) for module in built.model.modules()],
        [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in built.model.named_parameters()],
        [type(phase.optimizer).__qualname__ for phase in built.phases],
        [(tuple(t.shape[1:]), str(t.dtype)) for t in built.data.tensors],
        (known.course.batch_size, width, built.job.precision, built.job.share, device),
        (_VERSION, torch.__version__, _machine(device)),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
