"""What kinds of models there are, and how each is taken apart into arrays and put together again.

A form splits a model into what is trained (every floating point array) and the rest (counters, statistics, random states), two nests that a
program can take and return, and merges such nests into the user's kind of object. One file for each library: this one has what needs none.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.jax.model import Model
from carpool.errors import LossError, sentence
from carpool.fingerprint import fingerprint


class Parts(NamedTuple):
    """A model taken apart. Nests of arrays; random keys are held as their numbers."""

    trained: Any
    rest: Any


class Form(ABC):
    """One kind of model. It holds what of a model is no array: two models with equal `key` differ in their arrays alone."""

    key: Hashable
    is_callable: bool = True
    """Whether it makes predictions, so that a loss can be taken of them."""

    @classmethod
    @abstractmethod
    def claims(cls, model: Any) -> bool: ...

    @abstractmethod
    def split(self, model: Any) -> Parts: ...

    @abstractmethod
    def merge(self, parts: Parts) -> Any:
        """The user's kind of object, holding these arrays."""

    def owned(self, model: Any) -> tuple[Any, ...]:
        """The user's objects that `given_back` changes."""
        return ()

    def given_back(self, model: Any, parts: Parts) -> Any:
        """The user's own object holding these arrays, where it can be changed; else one like it."""
        return self.merge(parts)

    @abstractmethod
    def predicted(self, parts: Parts, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        """A batch's predictions, and the rest as it is afterwards."""

    @abstractmethod
    def stepped(self, parts: Parts, step: Callable[[Any], Any], key: Any, training: bool) -> tuple[Any, Any]:
        """What the user's step makes of the model, and the rest as it is afterwards.

        A step of a model with a state of its own, in a library whose models do not change, returns the state beside its loss.
        """


def form_of(model: Any) -> Form | None:
    """How this model is taken apart, or None where it is no model of JAX."""
    kind = kind_of(model)
    return None if kind is None else kind(model)


def kind_of(model: Any) -> Callable[[Any], Form] | None:
    """Which form takes this model. Only libraries that are imported can have made one."""
    for library, module, name in _TABLE:
        if library is None or library in sys.modules:
            kind = getattr(importlib.import_module(module), name)
            if kind.claims(model):
                return kind
    return None


_TABLE = (
    ("flax.nnx", "carpool.adapters.jax.nnx", "NnxForm"),
    ("flax.linen", "carpool.adapters.jax.linen", "LinenForm"),
    ("equinox", "carpool.adapters.jax.equinox", "EquinoxForm"),
    (None, "carpool.adapters.jax.forms", "ModelForm"),
    (None, "carpool.adapters.jax.forms", "NestForm"),
)


class NestForm(Form):
    """A nest of arrays: parameters without a function of their own. A step says what is computed with them."""

    is_callable = False

    def __init__(self, model: Any, arrays: Any = jax.Array | np.ndarray) -> None:
        """`arrays`: the types of those that are trained where they are of floating point."""
        self._leaves, self._tree = jax.tree.flatten(model)
        self._kinds = tuple(_kind(leaf, arrays) for leaf in self._leaves)
        held = zip(self._leaves, self._kinds, strict=True)
        static = tuple(
            (type(leaf), leaf) for leaf, kind in held if kind == "static"
        )  # 2 == 2.0, but not here
        self.key = (type(self).__name__, self._tree, self._kinds, static)

    @classmethod
    def claims(cls, model: Any) -> bool:
        if isinstance(model, str | type) or inspect.isroutine(model):
            return False
        leaves = jax.tree.leaves(model)
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
        return any(is_array) and all(
            isinstance(leaf, jax.Array | np.ndarray | float | int) for leaf in leaves
        )

    def split(self, model: Any) -> Parts:
        leaves = jax.tree.leaves(model)
        kinds = self._kinds
        trained = [leaf if kind == "trained" else None for leaf, kind in zip(leaves, kinds, strict=True)]
        rest = [plain(leaf) for leaf, kind in zip(leaves, kinds, strict=True) if kind in ("held", "key")]
        return Parts(jax.tree.unflatten(self._tree, trained), rest)

    def merge(self, parts: Parts) -> Any:
        trained, rest = iter(jax.tree.leaves(parts.trained)), iter(parts.rest)
        leaves = [
            leaf if kind == "static" else wrapped(next(rest), leaf) if kind != "trained" else next(trained)
            for leaf, kind in zip(self._leaves, self._kinds, strict=True)
        ]
        return jax.tree.unflatten(self._tree, leaves)

    def predicted(self, parts: Parts, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        raise TypeError("a nest of arrays makes no predictions")

    def stepped(self, parts: Parts, step: Callable[[Any], Any], key: Any, training: bool) -> tuple[Any, Any]:
        return step(self.merge(parts)), parts.rest


class ModelForm(Form):
    """Parameters with the function that applies them (`carpool.jax.Model`)."""

    def __init__(self, model: Model) -> None:
        self._apply = model.apply
        self._has_state = model.state is not None
        self._parameters = NestForm(model.parameters)
        self._state = NestForm(model.state)
        held = (self._parameters.key, self._state.key, self._has_state)
        self.key = ("Model", held, fingerprint(self._apply))

    @classmethod
    def claims(cls, model: Any) -> bool:
        return isinstance(model, Model)

    def split(self, model: Model) -> Parts:
        own = self._parameters.split(model.parameters)
        state = self._state.split(model.state)
        return Parts(own.trained, (own.rest, state.trained, state.rest))

    def merge(self, parts: Parts) -> Model:
        own, *state = parts.rest
        parameters = self._parameters.merge(Parts(parts.trained, own))
        held = self._state.merge(Parts(*state)) if self._has_state else None
        return Model(parameters, self._apply, held)

    def predicted(self, parts: Parts, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        model = self.merge(parts)
        given = {**keyed(self._apply, key), **moded(self._apply, training)}
        if not self._has_state:
            return self._apply(model.parameters, *listed(inputs), **given), parts.rest
        prediction, state = self._apply(model.parameters, model.state, *listed(inputs), **given)
        after = self._state.split(state)
        return prediction, (parts.rest[0], after.trained, after.rest)

    def stepped(self, parts: Parts, step: Callable[[Any], Any], key: Any, training: bool) -> tuple[Any, Any]:
        made = step(self.merge(parts))
        if not self._has_state:
            return made, parts.rest
        made, state = with_state(made)
        after = self._state.split(state)
        return made, (parts.rest[0], after.trained, after.rest)


# What forms share


def with_state(made: Any) -> tuple[Any, Any]:
    if isinstance(made, tuple) and len(made) == 2:
        return made
    raise LossError(
        sentence(
            "the step of a model with a state to return (loss, state)",
            type(made).__name__,
            "return the state beside the loss",
        )
    )


def listed(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def keyed(function: Any, key: Any) -> dict[str, Any]:
    """`key=`, where the function takes one."""
    return {"key": key} if "key" in words(function) else {}


def moded(function: Any, training: bool) -> dict[str, bool]:
    """Whether it trains, in the word that the function has for it."""
    known = words(function)
    as_it_is = {word: training for word in ("train", "training", "is_training") if word in known}
    reverse = {word: not training for word in ("deterministic", "use_running_average") if word in known}
    return as_it_is | reverse


def words(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf: Any) -> Any:
    """The array as numbers that can be stacked on the host."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def wrapped(value: Any, like: Any) -> Any:
    """The reverse of `plain`, for a leaf like this one."""
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like)) if is_key(like) else value


def _kind(leaf: Any, arrays: Any) -> str:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return "static"
    if is_key(leaf):
        return "key"
    return "trained" if isinstance(leaf, arrays) and jnp.issubdtype(leaf.dtype, jnp.inexact) else "held"
