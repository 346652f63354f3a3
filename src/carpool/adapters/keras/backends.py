"""Which engine runs the Keras backend that is loaded."""

from __future__ import annotations

import importlib

import keras

from carpool.adapters.keras.engine import Engine

_TABLE = {
    "jax": "carpool.adapters.keras.jax_engine:JaxEngine",
    "torch": "carpool.adapters.keras.torch_engine:TorchEngine",
    "tensorflow": "carpool.adapters.keras.tensorflow_engine:TensorFlowEngine",
}
BACKENDS = tuple(_TABLE)


def engine() -> type[Engine]:
    """The engine of the loaded backend."""
    module, _, attribute = _TABLE[keras.backend.backend()].partition(":")
    return getattr(importlib.import_module(module), attribute)
