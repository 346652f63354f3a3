"""JAX devices by carpool's names."""

from __future__ import annotations

import os
from typing import Any

import jax

from carpool.errors import DeviceError, sentence
from carpool.memory.enforce import begun

_PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "rocm": "cuda"}


_MEMORY = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


def begin() -> None:
    """Where JAX has not started yet, lets it start without taking most of a GPU at once; who has said how much it may take is obeyed.

    Nobody who trains JAX models beside others wants the rest to find no memory, and once JAX has started it is too late.
    """
    if not begun().jax and not any(name in os.environ for name in _MEMORY):
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def names() -> tuple[str, ...]:
    """Those that are there, the one that "auto" means first."""
    begin()
    return tuple(dict.fromkeys([*map(_name, jax.devices()), "cpu"]))


def chosen(name: str) -> str:
    known = names()
    if name == "auto":
        return known[0]
    place = f"{name}:0" if name in ("cuda", "tpu") else name
    if place not in known:
        raise DeviceError(
            sentence(f"a device out of auto, {', '.join(known)}", repr(name), 'pass device="auto"')
        )
    return place


def device_of(name: str) -> Any:
    platform, _, number = name.partition(":")
    return jax.devices({"cuda": "gpu"}.get(platform, platform))[int(number or 0)]


def _name(device: Any) -> str:
    platform = _PLATFORMS.get(device.platform, device.platform)
    return "cpu" if platform == "cpu" else f"{platform}:{device.id}"
