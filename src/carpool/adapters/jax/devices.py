"""JAX devices by carpool's names."""

from __future__ import annotations

from typing import Any

import jax

from carpool.errors import DeviceError, sentence

_PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "rocm": "cuda"}


def names() -> tuple[str, ...]:
    """Those that are there, the one that "auto" means first."""
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
