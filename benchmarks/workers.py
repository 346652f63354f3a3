"""Workers: two jobs whose step is pure Python, planned by `auto` beside one after another; and what supervision costs.

Supervision is timed inside a loop, between one step and the next, in a worker and in this process: starting a worker is left out
of it, and is part of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import carpool

STEP_S = 0.05
STEPS, LOOP_STEPS = 400, 100
NOTES = (
    "STEPS steps of about STEP_S of pure Python each; whole calls of carpool.train, worker start included",
    "one after another is strategy='in_turn'",
)


def count(turns: int) -> int:
    """Pure Python, which holds the interpreter's lock."""
    total = 0
    for i in range(turns):
        total += i
    return total


def turns_of(seconds: float) -> int:
    """How many turns take so long here: the best of a few tries."""
    probe = 200_000
    best = min(_seconds(partial(count, probe)) for _ in range(5))
    return max(1, int(probe * seconds / best))


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def slow_step(model: nn.Module, batch: tuple[Tensor], turns: int) -> Tensor:
    count(turns)
    return model(batch[0]).square().mean()


def job(width: int, turns: int) -> carpool.Job:
    return carpool.Job(
        partial(nn.Linear, 4, width),
        (torch.ones(STEPS, 4),),
        step=partial(slow_step, turns=turns),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        batch_size=1,
        name=f"width={width}",
    )


def loop(turns: int) -> Iterator[Mapping[str, float]]:
    """Returns how long its steps took, and how long it waited between them."""
    steps_s = between_s = 0.0
    for _ in range(LOOP_STEPS):
        started = time.perf_counter()
        count(turns)
        ended = time.perf_counter()
        yield {"loss": 0.0}
        steps_s += ended - started
        between_s += time.perf_counter() - ended
    return steps_s, between_s


def _trained(turns: int, strategy: str) -> tuple[float, Any]:
    started = time.perf_counter()
    results = carpool.train([job(2, turns), job(3, turns)], device="cpu", strategy=strategy, reporters=[])
    return time.perf_counter() - started, results


def _looped(turns: int, strategy: str) -> tuple[float, float]:
    made = carpool.Loop(loop, turns, every=10)
    return carpool.train([made], device="cpu", strategy=strategy, reporters=[])[0].model


def run(windows: int, say: Callable[[str], None]) -> dict[str, Any]:
    turns = turns_of(STEP_S)
    say(f"{turns} turns for a step of {1e3 * STEP_S:.0f} ms")
    auto: list[float] = []
    in_turn: list[float] = []
    chosen, reason = "", ""
    for window in range(windows):
        seconds, results = _trained(turns, "auto")
        auto.append(seconds)
        chosen, reason = results[0].strategy, results[0].reason
        in_turn.append(_trained(turns, "in_turn")[0])
        say(f"window {window}: auto {auto[-1]:.2f} s ({chosen}), one after another {in_turn[-1]:.2f} s")
    here, apart = [], []
    for window in range(windows):
        here.append(_looped(turns, "in_turn"))
        apart.append(_looped(turns, "isolated"))
        say(f"window {window}: steps and what is between them, here {here[-1]}, in a worker {apart[-1]}")
    scores = {
        "auto_s": median(auto),
        "one_after_another_s": median(in_turn),
        "times_faster": median(in_turn) / median(auto),
        "chosen": chosen,
        "reason": reason,
        "between_steps_percent_here": 100 * median(between / steps for steps, between in here),
        "between_steps_percent_in_a_worker": 100 * median(between / steps for steps, between in apart),
        "steps_in_a_worker_over_here": median(s for s, _ in apart) / median(s for s, _ in here),
    }
    samples = {
        "auto_s": auto,
        "one_after_another_s": in_turn,
        "loop_here_s": here,
        "loop_in_a_worker_s": apart,
    }
    settings = {"windows": windows, "step_s": STEP_S, "steps": STEPS, "loop_steps": LOOP_STEPS}
    return {"settings": settings, "notes": NOTES, "scores": scores, "samples": samples}
