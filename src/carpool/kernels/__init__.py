"""Model-batched operators: what a fused step needs that a framework does not have. One file for each kind."""

from importlib import import_module
from typing import Any

_LATER = ("updates",)


def __getattr__(name: str) -> Any:
    """What users add to, imported when it is first asked for: it imports torch."""
    if name in _LATER:
        return import_module(f"carpool.kernels.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
