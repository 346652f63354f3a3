"""Flax NNX modules: objects that hold their arrays, changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from carpool.adapters.jax.forms import Form, Parts, _words, listed, plain, wrapped


class NnxForm(Form):
    """What is trained are its `nnx.Param`s. Random layers draw from the random states that the module holds."""

    def __init__(self, model: nnx.Module) -> None:
        self._graph, _, rest = nnx.split(model, nnx.Param, ...)
        self._like, self._tree = jax.tree.flatten(rest)
        self.key = ("nnx", self._graph)

    @classmethod
    def claims(cls, model: Any) -> bool:
        return isinstance(model, nnx.Module)

    def split(self, model: nnx.Module) -> Parts:
        _, trained, rest = nnx.split(model, nnx.Param, ...)
        return Parts(trained, [plain(leaf) for leaf in jax.tree.leaves(rest)])

    def merge(self, parts: Parts) -> nnx.Module:
        return nnx.merge(self._graph, parts.trained, self._rest(parts))

    def given_back(self, model: nnx.Module, parts: Parts) -> nnx.Module:
        nnx.update(model, parts.trained, self._rest(parts))
        return model

    def _rest(self, parts: Parts) -> Any:
        leaves = [wrapped(value, like) for value, like in zip(parts.rest, self._like, strict=True)]
        return jax.tree.unflatten(self._tree, leaves)

    def predicted(self, parts: Parts, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        model: Any = self._in_mode(parts, training)
        given = {"rngs": nnx.Rngs(key)} if "rngs" in _words(model) else {}
        return model(*listed(inputs), **given), self.split(model).rest

    def stepped(self, parts: Parts, step: Callable[[Any], Any], key: Any, training: bool) -> tuple[Any, Any]:
        model = self._in_mode(parts, training)
        return step(model), self.split(model).rest

    def _in_mode(self, parts: Parts, training: bool) -> nnx.Module:
        model = self.merge(parts)
        if not training:
            model.eval()
        return model
