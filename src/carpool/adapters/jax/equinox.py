"""Equinox modules, and pairs of a module and its state (`eqx.nn.make_with_state`).

A module takes one sample: a batch is mapped over it, along an axis named "batch", the name that `eqx.nn.BatchNorm` is to be given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from carpool.adapters.jax.forms import Form, NestForm, Parts, keyed, listed, with_state


class EquinoxForm(Form):
    """A module is a nest itself. What is trained are its JAX arrays of floating point, as `eqx.filter_grad` has it."""

    def __init__(self, model: Any) -> None:
        self._has_state = isinstance(model, tuple)
        module, state = model if self._has_state else (model, None)
        self._module, self._state = NestForm(module, jax.Array), NestForm(state)
        self.is_callable = callable(module)
        self.key = ("equinox", self._module.key, self._state.key, self._has_state)

    @classmethod
    def claims(cls, model: Any) -> bool:
        if isinstance(model, tuple):
            return len(model) == 2 and isinstance(model[0], eqx.Module) and isinstance(model[1], eqx.nn.State)
        return isinstance(model, eqx.Module)

    def split(self, model: Any) -> Parts:
        module, state = model if self._has_state else (model, None)
        own, held = self._module.split(module), self._state.split(state)
        return Parts(own.trained, (own.rest, held.trained, held.rest))

    def merge(self, parts: Parts) -> Any:
        module = self._module.merge(Parts(parts.trained, parts.rest[0]))
        return (module, self._state.merge(Parts(*parts.rest[1:]))) if self._has_state else module

    def predicted(self, parts: Parts, inputs: Any, key: Any, training: bool) -> tuple[Any, Any]:
        model = self._in_mode(parts, training)
        module, state = model if self._has_state else (model, None)
        samples = listed(inputs)
        keys = jax.random.split(key, len(jax.tree.leaves(samples)[0])) if keyed(module, key) else None

        def one(key: Any, *sample: Any) -> Any:
            given = {} if key is None else {"key": key}
            return module(*sample, **given) if state is None else module(*sample, state, **given)

        axes = (None if keys is None else 0, *[0] * len(samples))
        out = (0, None) if self._has_state else 0
        made = jax.vmap(one, in_axes=axes, out_axes=out, axis_name="batch")(keys, *samples)
        if not self._has_state:
            return made, parts.rest
        return made[0], self._after(parts, made[1])

    def stepped(self, parts: Parts, step: Callable[[Any], Any], key: Any, training: bool) -> tuple[Any, Any]:
        made = step(self._in_mode(parts, training))
        if not self._has_state:
            return made, parts.rest
        made, state = with_state(made)
        return made, self._after(parts, state)

    def _in_mode(self, parts: Parts, training: bool) -> Any:
        model = self.merge(parts)
        return model if training else eqx.nn.inference_mode(model)

    def _after(self, parts: Parts, state: Any) -> Any:
        held = self._state.split(state)
        return (parts.rest[0], held.trained, held.rest)
