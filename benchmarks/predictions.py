"""`carpool.predict` on a CPU: as machine code, without, and a loop over the models, in turns. `python -m benchmarks predictions`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import carpool
from carpool.adapters.torch import predicting


@dataclass(frozen=True)
class Size:
    """So many models of one structure, and what they are given."""

    title: str
    make: Callable[[], nn.Module]
    models: int
    inputs: tuple[int, ...]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    )  # fmt: skip


SIZES = (
    Size("512 MLPs 32-64-10, 10,000 samples", _mlp, 512, (10_000, 32)),
    Size("50 MLPs 32-64-10, 100 samples", _mlp, 50, (100, 32)),
    Size("64 CNNs, 1,000 images of 28 × 28", _cnn, 64, (1_000, 1, 28, 28)),
)


def run(windows: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Seconds of each way, and what machine code gains: medians of alternating windows."""
    found: dict[str, dict[str, float]] = {}
    for size in SIZES:
        found[size.title] = _compared(size, windows)
        say(f"{size.title}: {found[size.title]}")
    return {"settings": {"windows": windows, "torch_threads": torch.get_num_threads()}, "scores": found}


def _compared(size: Size, windows: int) -> dict[str, float]:
    torch.manual_seed(0)
    models = [size.make().eval() for _ in range(size.models)]
    inputs = torch.randn(size.inputs)
    ways: dict[str, Callable[[], object]] = {
        "made_s": lambda: carpool.predict(models, inputs, device="cpu"),
        "stacked_s": lambda: _without(models, inputs),
        "loop_s": lambda: _loop(models, inputs),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    first_s = _seconds(ways["made_s"])
    for way in ways.values():
        way()
    for _ in range(windows):
        for name, way in ways.items():
            taken[name].append(_seconds(way))
    medians = {name: round(statistics.median(seconds), 4) for name, seconds in taken.items()}
    gains = {
        "stacked ÷ made": round(medians["stacked_s"] / medians["made_s"], 2),
        "loop ÷ made": round(medians["loop_s"] / medians["made_s"], 2),
    }
    return {"first_call_s": round(first_s, 3), **medians, **gains}


def _without(models: Sequence[nn.Module], inputs: Tensor) -> object:
    may = predicting._may
    predicting._may = lambda task: False
    try:
        return carpool.predict(list(models), inputs, device="cpu")
    finally:
        predicting._may = may


def _loop(models: Sequence[nn.Module], inputs: Tensor) -> object:
    with torch.no_grad():
        return [model(inputs) for model in models]


def _seconds(way: Callable[[], object]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started
