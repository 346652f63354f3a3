"""How much of a job's step holds Python's lock, measured on a copy of its model and remembered from run to run."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from carpool import recall
from carpool.adapters.torch.fuse import Known
from carpool.adapters.torch.pace import pace_key
from carpool.adapters.torch.precision import untouched
from carpool.adapters.torch.streams import Streamed
from carpool.ambient import Ambient
from carpool.errors import failure
from carpool.kernels.table import alone
from carpool.planning.holds import LEAST_S, Hold
from carpool.process.gil import held

_FEWEST_STEPS = 50  # a job of fewer is not tried: its steps would have to be a fifth of a second long


def hold_of(known: Known, device: str, measure: bool) -> Hold | None:
    """What is remembered of such a step; else, where `measure` and the job is long enough, what it shows now."""
    built = known.built
    if isinstance(built.data, Streamed) or built.manual is not None or known.course.steps < _FEWEST_STEPS:
        return None
    key = _key(known, device)
    if (found := recall.remembered(key, Hold)) is not None or not measure:
        return found
    try:
        found = _measured(known)
    except BaseException as error:  # the job's own fault shows when it trains
        failure(error)
        return None
    if found is not None:
        recall.remember(key, found)
    return found


def _measured(known: Known) -> Hold | None:
    """None where the first step, which is slower than others, shows already that there is too little to do."""
    with Ambient(known.built.job.seed).inside(), untouched(known.built.job.precision, "cpu"):
        step = _step(known)
        started = time.perf_counter()
        step()
        if known.course.steps * (time.perf_counter() - started) < LEAST_S:
            return None
        found = held(step)
    return Hold(round(found.share, 3), found.call_s)


def _step(known: Known) -> Callable[[], None]:
    """A training step on copies of the model and its optimizers, as the job alone would take it."""
    built = known.built
    model, optimizers = copy.deepcopy((built.model, [phase.optimizer for phase in built.phases]))
    size = known.course.size(0)
    rows = slice(size) if built.data.index is None else built.data.index[:size]
    tensors = [tensor[rows].clone() for tensor in built.data.tensors]

    def step() -> None:
        for number, (phase, optimizer) in enumerate(zip(built.phases, optimizers, strict=True)):
            with torch.enable_grad(), alone(built.seed, 0, number) if known.probe.random else nullcontext():
                values = phase.step(model, built.data.batch(tensors), 0)
            values[phase.loss].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def _key(known: Known, device: str) -> str:
    """Like a trial's, and what the step's Python code is: it decides who holds the lock."""
    job = known.built.job
    functions = [job.loss, job.step, *(phase.step for phase in job.phases or ())]
    functions += [type(module).forward for module in known.built.model.modules()]
    codes = [_code(function) for function in functions]
    return hashlib.sha256(repr(("hold", pace_key(known, 1, device), codes)).encode()).hexdigest()


def _code(function: Any) -> str:
    code = getattr(getattr(function, "func", function), "__code__", None)
    return "" if code is None else hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()
