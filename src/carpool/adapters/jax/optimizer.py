"""A job's optimizer: an optax transformation and its state, however they were given, and what is given back afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from carpool.adapters.jax.shapes import shapes as nest_shapes
from carpool.errors import OptimizerError, failure, sentence
from carpool.fingerprint import fingerprint
from carpool.job import Job


def is_optimizer(made: Any) -> bool:
    return callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))


def is_nnx(made: Any) -> bool:
    """Whether it is an `nnx.Optimizer`, which holds a transformation and its state."""
    if "flax.nnx" not in sys.modules:
        return False
    from carpool.adapters.jax.nnx import is_optimizer

    return is_optimizer(made)


Begin = Callable[[Any, Any], Any]
"""An optimizer's first state, of the optimizer and what it trains."""


class Beginnings:
    """First states, made once for optimizers of one make: most of them are zeros, whatever the parameters, and arrays do not change."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def __call__(self, optimizer: Any, trained: Any) -> Any:
        key = (fingerprint(optimizer.init), nest_shapes(trained))
        try:
            if key not in self._made:
                self._made[key] = optimizer.init(trained) if _is_constant(optimizer.init, trained) else None
        except BaseException as error:  # whatever is wrong, the call shows it
            failure(error)
            return optimizer.init(trained)
        held = self._made[key]
        return optimizer.init(trained) if held is None else held


def _is_constant(init: Callable[[Any], Any], trained: Any) -> bool:
    """Whether what it makes hangs on nothing but shapes, and does nothing beside."""
    jaxpr = jax.make_jaxpr(init)(trained).jaxpr
    read = [var for eqn in jaxpr.eqns for var in eqn.invars] + jaxpr.outvars
    return not jaxpr.effects and not any(var in jaxpr.invars for var in read if isinstance(var, Var))


def build_optimizer(job: Job, trained: Any, begin: Begin) -> tuple[Any, Any]:
    """The transformation, and its state: the one that was given, or its first."""
    made: Any = job.optimizer
    if is_nnx(made):
        return made.tx, _state_of(job, made, trained)
    if isinstance(made, tuple) and len(made) == 2 and is_optimizer(made[0]):
        _check_state(job, made[0], made[1], trained)
        return made
    if not is_optimizer(made):
        raise OptimizerError(
            _says(
                job,
                "an optax optimizer, (optimizer, state) to go on from a state, or an nnx.Optimizer",
                _shown(made),
                "pass optimizer=optax.adam(1e-3)",
            )
        )
    optimizer: Any = made
    return optimizer, begin(optimizer, trained)


def given_back(made: Any, state: Any, steps: int) -> Any:
    """The state; of an `nnx.Optimizer` itself, holding it."""
    if not is_nnx(made):
        return state
    from carpool.adapters.jax.nnx import variables

    for variable, value in zip(variables(made.opt_state), jax.tree.leaves(state), strict=True):
        variable.set_value(value)
    made.step.set_value(made.step.get_value() + steps)
    return made


def state_of(given: Any, like: Any) -> Any:
    """The state in what was given back."""
    return (
        jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(given.opt_state))
        if is_nnx(given)
        else given
    )


def _state_of(job: Job, made: Any, trained: Any) -> Any:
    """The state that an `nnx.Optimizer` holds, as its transformation has it."""
    expected = jax.eval_shape(made.tx.init, trained)
    leaves = jax.tree.leaves(made.opt_state)
    if _shapes(leaves) != _shapes(jax.tree.leaves(expected)):
        raise OptimizerError(
            _says(
                job,
                "an nnx.Optimizer of this model",
                "one of another",
                "pass nnx.Optimizer(model, tx, wrt=nnx.Param)",
            )
        )
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def _check_state(job: Job, optimizer: Any, state: Any, trained: Any) -> None:
    expected: Any = jax.eval_shape(optimizer.init, trained)
    leaves, tree = jax.tree.flatten(state)
    if jax.tree.structure(expected) == tree and _shapes(leaves) == _shapes(jax.tree.leaves(expected)):
        return
    received = (
        _names(state) if _names(state) != _names(expected) else "one of other shapes or another kind of model"
    )
    raise OptimizerError(
        _says(
            job,
            f"a state of this optimizer for this model: {_names(expected)}",
            received,
            "pass what optimizer.init made of these parameters, or the result.optimizer of the same model and optimizer",
        )
    )


def _shapes(leaves: Any) -> list[Any]:
    return [jnp.shape(leaf) for leaf in leaves]


def _names(state: Any) -> str:
    """The parts of a state by name, the empty ones left out."""
    parts = state if type(state) is tuple else (state,)
    return ", ".join(type(part).__name__ for part in parts if jax.tree.leaves(part)) or "an empty one"


def _shown(made: Any) -> str:
    if made is None:
        return "None"
    name = getattr(made, "__qualname__", None)
    return f"{name}, a {type(made).__name__}" if name else type(made).__name__


def _says(job: Job, expected: str, received: str, remedy: str) -> str:
    return f"Job {job.name!r}: " + sentence(expected, received, remedy)
