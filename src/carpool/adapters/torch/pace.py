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

_TRIES = 3
_LONG_S = 0.2


def alone_s(recipe: Recipe, case: Case, random: bool) -> float:
    """Seconds of a member's step as a job alone would take it: the shortest of a few, on a copy of its model."""
    built = case.built
    model = copy.deepcopy(built.model)
    leaves = dict(model.named_parameters())
    optimizers = [
        twin_optimizer(recipe, case, number, {name: leaves[name] for name in recipe.layout.names_of(number)})
        for number in range(len(built.phases))
    ]
    batch = built.data.batch(list(case.data))

    def step_s() -> float:
        started = time.perf_counter()
        for number, (phase, optimizer) in enumerate(zip(built.phases, optimizers, strict=True)):
            with alone(built.seed, case.step, number) if random else nullcontext():
                values = phase.step(model, batch, case.place)
            values[phase.loss].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    with torch.enable_grad(), untouched(recipe.precision, "cpu"), quickened(optimizers):
        return shortest(step_s)


def shortest(measure: Callable[[], float]) -> float:
    """The shortest of a few measurements; of long ones there is less to gain by trying again."""
    found = measure()
    for _ in range(_TRIES - 1):
        if found > _LONG_S:
            break
        found = min(found, measure())
    return found


def pace_key(known: Known, width: int, device: str) -> str:
    """What decides how fast a stack of this structure steps: shapes, layers, optimizer, width, and the machine."""
    built = known.built
    parts = [
        [(type(module).__qualname__, module.extra_repr()) for module in built.model.modules()],
        [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in built.model.named_parameters()],
        [type(phase.optimizer).__qualname__ for phase in built.phases],
        [(tuple(t.shape[1:]), str(t.dtype)) for t in built.data.tensors],
        (known.course.batch_size, width, built.job.precision, device),
        (torch.__version__, torch.get_num_threads(), platform.machine(), platform.processor()),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
