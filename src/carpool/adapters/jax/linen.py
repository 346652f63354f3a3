"""Flax Linen modules, bound to their variables. One that is not yet is initialised with a job's first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn

from carpool.adapters.jax.forms import Form, NestForm, Parts, listed, moded


class LinenForm(Form):
    """What is trained is the collection "params"; the other collections may change in training."""

    def __init__(self, model: nn.Module) -> None:
        self._module, variables = model.unbind()
        own, held = _apart(variables)
        self._own, self._held = NestForm(own), NestForm(held)
        self._collections = sorted(held)
        self.is_callable = callable(self._module)
        self.key = ("linen", self._module, self._own.key, self._held.key)

    @classmethod
    def claims(cls, model: Any) -> bool:
        return isinstance(model, nn.Module)

    def split(self, model: nn.Module) -> Parts:
        own, held = _apart(model.unbind()[1])
        return self._split(own, held)

    def _split(self, own: Any, held: Any) -> Parts:
        one, other = self._own.split(own), self._held.split(held)
        return Parts(one.trained, (one.rest, other.trained, other.rest))

    def merge(self, parts: Parts) -> nn.Module:
        return self._module.bind(self._variables(parts))

    def _variables(self, parts: Parts) -> Any:
        own = self._own.merge(Parts(parts.trained, parts.rest[0]))
        return {"params": own, **self._held.merge(Parts(*parts.rest[1:]))}

    def predicted(self, parts: Parts, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        given = moded(type(self._module).__call__, training)
        return self._run(parts, lambda module: module(*listed(inputs), **given), key, training)

    def stepped(self, parts: Parts, step: Callable[[Any], Any], key: Any, training: bool) -> tuple[Any, Any]:
        return self._run(parts, step, key, training)

    def _run(self, parts: Parts, function: Callable[[Any], Any], key: Any, training: bool) -> tuple[Any, Any]:
        rngs = {
            "dropout": key,
            "params": key,
        }  # Flax draws from "params" where a module asks for another name
        if not (training and self._collections):
            return nn.apply(function, self._module)(self._variables(parts), rngs=rngs), parts.rest
        made, after = nn.apply(function, self._module, mutable=self._collections)(
            self._variables(parts), rngs=rngs
        )
        held = self._held.split({**self._held.merge(Parts(*parts.rest[1:])), **after})
        return made, (parts.rest[0], held.trained, held.rest)


def is_bound(model: nn.Module) -> bool:
    return model.scope is not None


def bound(model: nn.Module, inputs: Any, key: Any) -> nn.Module:
    """The module with variables of its own: `module.init(key, x)`."""
    given: Any = moded(type(model).__call__, training=False)
    variables = model.init(key, *listed(inputs), **given)
    return model.bind(variables)


def _apart(variables: Any) -> tuple[Any, dict[str, Any]]:
    held = {name: value for name, value in variables.items() if name != "params"}
    return variables.get("params", {}), held
