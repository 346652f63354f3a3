"""What a model holds, as plain arrays: what a worker hands over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np


def held(model: Any) -> dict[str, Any]:
    """Everything that training changed in a model."""
    history = getattr(model, "history", None)
    return {
        "trained": [np.asarray(value) for value in model.get_weights()],
        "weights": _host(model.variables),
        "optimizer": _host(model.optimizer.variables),
        "metrics": _host(model.metrics_variables),
        "history": None if history is None else (list(history.epoch), dict(history.history), history.params),
    }


def write(model: Any, values: Mapping[str, Any]) -> None:
    """Puts what another process's copy of the model held into this one."""
    _write(model.variables, values["weights"])
    _write(model.optimizer.variables, values["optimizer"])
    _write(model.metrics_variables, values["metrics"])
    if values["history"] is not None:
        history = keras.callbacks.History()
        history.epoch, history.history, params = values["history"]
        history.set_params(params)
        history.set_model(model)
        model.history = history


def _host(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]


def _write(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
