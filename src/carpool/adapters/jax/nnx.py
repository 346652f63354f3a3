"""Flax NNX modules, and NNX' optimizers: objects that hold their arrays, changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from carpool.adapters.jax.forms import Form, Parts, listed, moded, plain, words, wrapped


class NnxForm(Form):
    """What is trained are its `nnx.Param`s, or what an `nnx.Optimizer` is for. Random layers draw from the random states that the module holds."""

    def __init__(self, model: nnx.Module, wrt: Any = nnx.Param) -> None:
        self._wrt = wrt
        self._graph, _, rest = nnx.split(model, wrt, ...)
        found, self._tree = jax.tree_util.tree_flatten_with_path(rest)
        self._like = dict(found)
        self.is_callable = callable(model)
        self.key = ("nnx", self._graph, self._tree)

    @classmethod
    def claims(cls, model: Any) -> bool:
        return isinstance(model, nnx.Module)

    def split(self, model: nnx.Module) -> Parts:
        """What a call leaves in the module that was not there before, such as an intermediate value, is no part of it."""
        _, trained, rest = nnx.split(model, self._wrt, ...)
        found = dict(jax.tree_util.tree_flatten_with_path(rest)[0])
        return Parts(trained, [plain(found[path]) for path in self._like])

    def merge(self, parts: Parts) -> nnx.Module:
        return nnx.merge(self._graph, parts.trained, self._rest(parts))

    def owned(self, model: nnx.Module) -> tuple[Any, ...]:
        return (model, *variables(nnx.state(model)))

    def given_back(self, model: nnx.Module, parts: Parts) -> nnx.Module:
        nnx.update(model, parts.trained, self._rest(parts))
        return model

    def _rest(self, parts: Parts) -> Any:
        leaves = [wrapped(value, like) for value, like in zip(parts.rest, self._like.values(), strict=True)]
        return jax.tree.unflatten(self._tree, leaves)

    def predicted(self, parts: Parts, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        model: Any = self._in_mode(parts, training)
        known = words(model)
        # What is None unless given follows from the module: its own mode, its own random states.
        given: dict[str, Any] = {
            word: on for word, on in moded(model, training).items() if known[word].default is not None
        }
        if "rngs" in known and known["rngs"].default is not None:
            given["rngs"] = nnx.Rngs(key)
        return model(*listed(inputs), **given), self.split(model).rest

    def stepped(self, parts: Parts, step: Callable[[Any], Any], key: Any, training: bool) -> tuple[Any, Any]:
        model = self._in_mode(parts, training)
        return step(model), self.split(model).rest

    def _in_mode(self, parts: Parts, training: bool) -> nnx.Module:
        model = self.merge(parts)
        if not training:
            model.eval()
        return model


def variables(nest: Any) -> list[Any]:
    """The `nnx.Variable`s in a nest."""
    leaves = jax.tree.leaves(nest, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Variable)]


def is_optimizer(made: Any) -> bool:
    return isinstance(made, nnx.Optimizer)
