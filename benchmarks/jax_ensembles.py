"""JAX ensembles: many jobs of one structure in `carpool.train`, beside vmap + scan by hand and one after another.

Two figures for carpool: the whole call, with its traces, stacking and handing over; and once open, from chunk to chunk of the same call.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import optax

import carpool
from benchmarks import jax_by_hand
from benchmarks.jax_nets import NETS, ROWS, Net, loss
from benchmarks.pace import Pace
from carpool.adapters.jax import programs
from carpool.events import GroupTried
from carpool.jax import Model

Say = Callable[[str], None]
CALL, OPEN = "carpool, whole call", "carpool, once open"
HAND, TURNS = "vmap + scan by hand", "scan, one after another"


def jobs(net: Net, members: int, epochs: int) -> list[carpool.Job]:
    data = net.data()

    def make(key: Any) -> Model:
        return Model(net.init(key), net.apply)

    rates = np.logspace(-4, -2, members).tolist()
    return [
        carpool.Job(
            make,
            data,
            loss=loss,
            optimizer=optax.adam(rate),
            batch_size=net.batch,
            epochs=epochs,
            seed=i,
            name=str(i),
        )
        for i, rate in enumerate(rates)
    ]


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _epochs(run: Callable[[int], Any], seconds: float) -> int:
    """So many epochs that they take about so long."""
    run(1)
    return max(1, round(2 * seconds / _seconds(partial(run, 2))))


def row(kind: str, members: int, windows: int, say: Say, seconds: float) -> Mapping[str, Any]:
    """Model-steps a second of each way, medians of alternating windows of about so many seconds."""
    net = NETS[kind]
    steps = members * net.steps

    def ours(epochs: int, *others: Callable[[Any], None]) -> tuple[float, float]:
        asked, pace = jobs(net, members, epochs), Pace()
        began = time.perf_counter()
        results = carpool.train(asked, reporters=[pace, *others])
        taken = time.perf_counter() - began
        assert all(result.outcome is carpool.Outcome.COMPLETED for result in results), results.failed
        return taken, pace.rate or 0.0

    def note(event: Any) -> None:
        if isinstance(event, GroupTried):
            tried.append(str(event.trial))

    tried: list[str] = []
    programs.forget()
    cold_s, _ = ours(2, note)
    by_hand, alone = jax_by_hand.together(net, members), jax_by_hand.in_turn(net)
    by_hand_cold_s = _seconds(partial(by_hand, 2))
    epochs, turns = max(16, _epochs(by_hand, seconds)), max(16, _epochs(alone, seconds))
    found: dict[str, list[float]] = {way: [] for way in (CALL, OPEN, HAND, TURNS)}
    once_s: list[float] = []
    for _ in range(windows):
        taken, rate = ours(epochs)
        found[CALL].append(steps * epochs / taken)
        found[OPEN].append(rate)
        once_s.append(taken - steps * epochs / rate)
        found[HAND].append(steps * epochs / _seconds(partial(by_hand, epochs)))
        found[TURNS].append(net.steps * turns / _seconds(partial(alone, turns)))
    rates = {way: statistics.median(each) for way, each in found.items()}
    best = max(rates[HAND], rates[TURNS])
    shown = {
        "kind": kind,
        "members": members,
        "epochs": {"together": epochs, "one after another": turns},
        "tried": tried,
        "cold_s": {"carpool": round(cold_s, 2), "by hand": round(by_hand_cold_s, 2)},
        "windows": {way: [round(rate) for rate in each] for way, each in found.items()},
        "model_steps_per_s": {way: round(rate) for way, rate in rates.items()},
        "once_open_to_by_hand": round(rates[OPEN] / rates[HAND], 3),
        "once_open_to_better": round(rates[OPEN] / best, 3),
        "whole_call_to_better": round(rates[CALL] / best, 3),
        "a_call_costs_once_s": round(statistics.median(once_s), 2),
    }
    say(f"{kind} x {members}: {shown}")
    return shown


def run(rows: Sequence[str], windows: int, quick: bool, say: Say) -> dict[str, Any]:
    wanted = [name.partition(":") for name in rows] or [(kind, "", "") for kind in ROWS]
    sizes = [
        (kind, members)
        for kind, _, size in wanted
        for members in ((int(size),) if size else ROWS[kind] if not quick else (4,))
    ]
    seconds = 1.5 if jax.default_backend() == "gpu" else 0.5 if quick else 5.0
    found = [row(kind, members, windows, say, seconds) for kind, members in sizes]
    return {"jax": jax.__version__, "rows": found}
