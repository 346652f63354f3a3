"""Keras fits: three different models with three datasets, as people fit them, beside `carpool.fit`; and 512 small ones beside JAX by hand.

The backend is the one that KERAS_BACKEND names. Cold: models just built, everything compiled inside. Warm: the same models fitted again.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

import carpool

Say = Callable[[str], None]
SHAPES = {  # samples, inputs, hidden, classes, learning rate
    "a": (1000, 32, 64, 10, 1e-3),
    "b": (800, 64, 128, 5, 5e-4),
    "c": (1200, 16, 32, 2, 2e-3),
}
BATCH = 32
MORE = 40  # times the epochs: so much longer is the call that is compared with a short one, to tell what both cost once


def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    samples, inputs, _, classes, _ = SHAPES[name]
    random = np.random.default_rng(0)
    return random.normal(size=(samples, inputs)).astype("float32"), random.integers(
        0, classes, samples
    ).astype("int32")


def build(name: str) -> keras.Model:
    _, inputs, hidden, classes, rate = SHAPES[name]
    parts = [keras.Input((inputs,)), layers.Dense(hidden, activation="relu")]
    model = keras.Sequential([*parts, layers.Dense(classes, activation="softmax")])
    model.compile(optimizer=keras.optimizers.Adam(rate), loss="sparse_categorical_crossentropy")
    return model


DATA = {name: data(name) for name in SHAPES}


def in_turn(models: dict[str, keras.Model], epochs: int) -> None:
    for name, model in models.items():
        model.fit(*DATA[name], epochs=epochs, batch_size=BATCH, verbose=0)  # type: ignore


def together(models: dict[str, keras.Model], epochs: int) -> None:
    x, y = ({name: pair[i] for name, pair in DATA.items()} for i in (0, 1))
    results = carpool.fit(
        models, x=carpool.each(**x), y=carpool.each(**y), epochs=epochs, batch_size=BATCH, reporters=[]
    )
    assert all(result.outcome is carpool.Outcome.COMPLETED for result in results), results


def three(windows: int, epochs: int, say: Say) -> dict[str, Any]:
    steps = sum(epochs * -(-shape[0] // BATCH) for shape in SHAPES.values())
    ways = {"fit in turn": in_turn, "carpool": together}
    in_turn({name: build(name) for name in SHAPES}, 1)  # the framework's own start-up is nobody's
    kept = {way: {name: build(name) for name in SHAPES} for way in ways}
    for way, run in ways.items():
        run(kept[way], epochs)
    warm: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(windows):
        for way, run in ways.items():
            began = time.perf_counter()
            run(kept[way], epochs)
            warm[way].append(time.perf_counter() - began)
    cold: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(min(3, windows)):
        for way, run in ways.items():
            models = {name: build(name) for name in SHAPES}
            _forget()
            began = time.perf_counter()
            run(models, 5)
            cold[way].append(time.perf_counter() - began)
    median = {way: statistics.median(taken) for way, taken in warm.items()}
    first = {way: statistics.median(taken) for way, taken in cold.items()}
    found = {
        "epochs": epochs,
        "warm_s": warm,
        "cold_s": cold,
        "warm_steps_per_s": {way: round(steps / taken) for way, taken in median.items()},
        "warm_ratio": round(median["fit in turn"] / median["carpool"], 2),
        "cold_wall_ratio": round(first["carpool"] / first["fit in turn"], 2),
    }
    say(f"three models: {found}")
    return found


def _forget() -> None:
    """Programs that carpool keeps from call to call: cold is without them."""
    if keras.backend.backend() == "jax":
        from carpool.adapters.keras import jax_engine

        jax_engine._programs.clear()


def members(count: int, samples: int, epochs: int, windows: int, say: Say) -> dict[str, Any]:
    """Many MLPs of one structure, each with a learning rate of its own: carpool beside vmap and scan by hand, on JAX."""
    import jax

    from benchmarks.keras_by_hand import by_hand

    random = np.random.default_rng(0)
    x = random.normal(size=(samples, 32)).astype("float32")
    y = random.integers(0, 10, samples).astype("int32")
    models = []
    for i in range(count):
        model = build("a")
        model.optimizer.learning_rate = 1e-3 * (1 + i / count)
        models.append(model)
    run, state = by_hand(models, x, y, BATCH, epochs)
    ours: list[float] = []
    longer: list[float] = []
    theirs: list[float] = []

    def ours_s(times: int) -> float:
        began = time.perf_counter()
        carpool.fit(models, x, y, epochs=times * epochs, batch_size=BATCH, reporters=[])
        return time.perf_counter() - began

    for window in range(windows + 1):
        once, longest = ours_s(1), ours_s(1 + MORE)
        began = time.perf_counter()
        state = jax.block_until_ready(run(state))
        if window:  # the first compiles
            ours.append(once)
            longer.append(longest)
            theirs.append(time.perf_counter() - began)
    steps = count * epochs * -(-samples // BATCH)
    once_open = (statistics.median(longer) - statistics.median(ours)) / MORE
    found = {
        "members": count,
        "samples": samples,
        "epochs": epochs,
        "carpool_s": ours,
        "carpool_longer_s": longer,
        "longer_is_times_as_many_epochs": 1 + MORE,
        "by_hand_s": theirs,
        "carpool_steps_per_s": round(steps / statistics.median(ours)),
        "by_hand_steps_per_s": round(steps / statistics.median(theirs)),
        "whole_call_slower_by": round(statistics.median(ours) / statistics.median(theirs), 2),
        "once_open_slower_by": round(once_open / statistics.median(theirs), 2),
        "longer_call_slower_by": round(
            statistics.median(longer) / ((1 + MORE) * statistics.median(theirs)), 2
        ),
    }
    say(f"members: {found}")
    return found


def run(windows: int, quick: bool, say: Say, rows: Sequence[str] = ("three", "members")) -> dict[str, Any]:
    backend = keras.backend.backend()
    found: dict[str, Any] = {"backend": backend, "keras": keras.__version__}
    if "three" in rows:
        found["three"] = three(windows, 5 if quick else 20, say)
    if backend == "jax" and "members" in rows:
        count, samples = (32, 1024) if quick else (512, 8192)
        found["members"] = members(count, samples, 2 if quick else 10, min(3, windows), say)
    return found
