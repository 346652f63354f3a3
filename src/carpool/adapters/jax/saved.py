"""A model's arrays and an optimizer's state under the names of their places, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from carpool.adapters.jax.forms import Parts, form_of
from carpool.adapters.jax.optimizer import is_nnx
from carpool.adapters.matching import matched
from carpool.arrays import Array


def weights(model: Any) -> dict[str, Array]:
    form = form_of(model)
    assert form is not None, "it was claimed"
    return _arrays(form.split(model))


def load_weights(model: Any, arrays: Mapping[str, Array]) -> Any:
    """The same object where it can be changed (NNX), else one like it."""
    form = form_of(model)
    assert form is not None, "it was claimed"
    parts = Parts(*_replaced(form.split(model), arrays))
    return form.given_back(model, parts)


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Of optax' state by the places of its leaves; of an `nnx.Optimizer` likewise, with its count of steps."""
    if not is_nnx(optimizer):
        return {"state": _arrays(optimizer)}
    steps = Array.of(np.asarray(optimizer.step.get_value()))
    return {"state": _arrays(_values(optimizer)), "step": steps}


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> Any:
    if not is_nnx(optimizer):
        return _replaced(optimizer, state["state"])
    from carpool.adapters.jax.nnx import variables

    values = _replaced(_values(optimizer), state["state"])
    for variable, value in zip(variables(optimizer.opt_state), values, strict=True):
        variable.set_value(value)
    optimizer.step.set_value(jax.device_put(state["step"].numpy()))
    return optimizer


def _values(optimizer: Any) -> list[Any]:
    from carpool.adapters.jax.nnx import variables

    return [variable.get_value() for variable in variables(optimizer.opt_state)]


def _arrays(nest: Any) -> dict[str, Array]:
    found, _ = jax.tree_util.tree_flatten_with_path(nest)
    return {jax.tree_util.keystr(where): Array.of(leaf) for where, leaf in found}


def _replaced(nest: Any, arrays: Mapping[str, Array]) -> Any:
    found, tree = jax.tree_util.tree_flatten_with_path(nest)
    names = [jax.tree_util.keystr(where) for where, _ in found]
    held = matched({name: np.shape(leaf) for name, (_, leaf) in zip(names, found, strict=True)}, arrays)
    return jax.tree.unflatten(tree, [jax.device_put(held[name].numpy()) for name in names])
