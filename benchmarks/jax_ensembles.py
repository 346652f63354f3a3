"""JAX ensembles: many jobs of one structure in `carpool.train`, beside vmap + scan by hand and one after another.

Two figures for carpool: the whole call, with its traces, stacking and handing over; and once open, from calls of two lengths.
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
from carpool.adapters.jax import programs
from carpool.jax import Model

Say = Callable[[str], None]


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


def row(kind: str, members: int, windows: int, say: Say, seconds: float, short: int = 2) -> Mapping[str, Any]:
    """Model-steps a second of each way, medians of alternating windows of about so many seconds."""
    net = NETS[kind]

    def ours(epochs: int) -> float:
        asked = jobs(net, members, epochs)
        began = time.perf_counter()
        results = carpool.train(asked, reporters=[])
        taken = time.perf_counter() - began
        assert all(result.outcome is carpool.Outcome.COMPLETED for result in results), results.failed
        return taken

    programs.forget()
    cold_s = ours(short)
    by_hand, alone = jax_by_hand.together(net, members), jax_by_hand.in_turn(net)
    by_hand_cold_s = _seconds(partial(by_hand, short))
    more, turns = max(10, _epochs(by_hand, seconds)), max(10, _epochs(alone, seconds))
    taken: dict[str, list[float]] = {way: [] for way in ("short", "long", "by hand", "in turn")}
    for _ in range(windows):
        taken["short"].append(ours(short))
        taken["long"].append(ours(short + more))
        taken["by hand"].append(_seconds(partial(by_hand, more)))
        taken["in turn"].append(_seconds(partial(alone, turns)))
    median = {way: statistics.median(each) for way, each in taken.items()}
    steps = members * net.steps
    open_s = median["long"] - median["short"]
    rates = {
        "carpool, once open": steps * more / open_s,
        "carpool, whole call": steps * (short + more) / median["long"],
        "vmap + scan by hand": steps * more / median["by hand"],
        "scan, one after another": net.steps * turns / median["in turn"],
    }
    best = max(rates["vmap + scan by hand"], rates["scan, one after another"])
    found = {
        "kind": kind,
        "members": members,
        "epochs": {"short": short, "long": short + more, "by hand": more, "in turn": turns},
        "seconds": taken,
        "cold_s": {"carpool": cold_s, "by hand": by_hand_cold_s},
        "model_steps_per_s": {way: round(rate) for way, rate in rates.items()},
        "once_open_to_by_hand": round(rates["carpool, once open"] / rates["vmap + scan by hand"], 3),
        "once_open_to_better": round(rates["carpool, once open"] / best, 3),
        "opening_s": round(median["short"] - short * open_s / more, 2),
    }
    say(f"{kind} x {members}: {found}")
    return found


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
