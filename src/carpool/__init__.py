"""One GPU, many models: trains many models at once, each ending where it would have ended alone.

Importing this imports no framework and touches no device.
"""

from importlib import import_module
from typing import Any

from carpool import data
from carpool.errors import CarpoolError, Interrupted
from carpool.fit import each, fit
from carpool.grid import grid
from carpool.job import Job, Phase, Schedule
from carpool.loop import Loop
from carpool.map import map
from carpool.memory.enforce import limit_memory
from carpool.order import batch_order
from carpool.predict import predict
from carpool.result import Outcome, Result, Results
from carpool.saving import load
from carpool.stack import Stack
from carpool.stopping import EarlyStopping
from carpool.train import plan, train

__version__ = "0.1.0.dev0"

__all__ = [
    "CarpoolError",
    "EarlyStopping",
    "Interrupted",
    "Job",
    "Loop",
    "Outcome",
    "Phase",
    "Result",
    "Results",
    "Schedule",
    "Stack",
    "batch_order",
    "data",
    "each",
    "fit",
    "grid",
    "limit_memory",
    "load",
    "map",
    "plan",
    "predict",
    "train",
]


_LATER = ("doctor", "jax", "kernels", "tensorflow", "testing")
"""Modules that are there too, and are imported when they are first asked for: some of them import a framework."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f"carpool.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
