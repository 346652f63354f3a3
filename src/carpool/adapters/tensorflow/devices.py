"""TensorFlow's devices by carpool's names."""

from __future__ import annotations

import tensorflow as tf

from carpool.adapters.tensorflow import memory
from carpool.adapters.tensorflow.build import Built
from carpool.adapters.tensorflow.says import says
from carpool.errors import DeviceError, sentence


def chosen(name: str) -> str:
    """The device meant by the name, as carpool calls it. Starts TensorFlow, with what was said about its memory."""
    memory.begin()
    gpus = [f"cuda:{number}" for number, _ in enumerate(tf.config.list_logical_devices("GPU"))]
    known = (*gpus, "cpu")
    place = known[0] if name == "auto" or (name == "cuda" and gpus) else name
    if place not in known:
        raise DeviceError(
            sentence(f"a device out of auto, {', '.join(known)}", repr(name), 'pass device="auto"')
        )
    return place


def place_of(name: str) -> str:
    """The same in TensorFlow's words.

    >>> place_of("cpu"), place_of("cuda:1")
    ('CPU:0', 'GPU:1')
    """
    kind, _, number = name.partition(":")
    return f"{'GPU' if kind == 'cuda' else 'CPU'}:{number or 0}"


def check_place(built: Built, place: str) -> None:
    """Raises for a module whose variables are elsewhere; one under a strategy is where the strategy has put it."""
    if built.strategy is not None:
        return
    stray = next((h for h in built.variables if not h.handles[0].device.endswith(place)), None)
    if stray is not None:
        remedy = "make it under tf.device(...), or leave device= out"
        where = stray.handles[0].device
        raise DeviceError(
            says(built.job, f"a module whose variables are on {place}", f"{stray.name!r} on {where}", remedy)
        )
