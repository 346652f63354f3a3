"""What one member of a population does: how it begins, a step of it, its predictions. Each is traced once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.jax.forms import Form, NestForm, Parts, form_of, keyed
from carpool.adapters.jax.formulation import candidates, convolves
from carpool.adapters.jax.lift import Traced, traced
from carpool.adapters.jax.program import ALONE, MAPPED, Formulation, State
from carpool.adapters.jax.recipe import scalars
from carpool.adapters.jax.rule import Rule
from carpool.adapters.jax.shapes import shown
from carpool.adapters.jax.telling import told
from carpool.errors import ModelError, OptimizerError, described, sentence

_PREDICTED = 0xFFFFFFFF  # the keys of predictions are no step's


@dataclass(frozen=True)
class Member:
    """The forms of all members differ in nothing that a step computes; where they are equal there is but one."""

    forms: tuple[Form, ...]
    step: Callable[..., Any]
    rule: Rule

    @property
    def form(self) -> Form:
        return self.forms[0]

    def begun(self, parts: Traced | None, own: Any, hyper: Any) -> Traced:
        """(key, or parts where they are made already; hyper-parameters) to its state."""

        def begin(own: Any, hyper: Any) -> State:
            made = Parts(*(own if parts is None else parts.run((own,), {})))
            return State(made.trained, made.rest, self.rule.begun(hyper, made.trained))

        return traced(begin, own, hyper)

    def stepped(self, state: State, batch: Any, key: Any, hyper: Any) -> Traced:
        """(state, batch, key, hyper-parameters) to the state afterwards and scalars by name."""
        found = [traced(self._step(form), state, batch, key, hyper) for form in self.forms]
        if any(repr(told(other.closed)) != repr(told(found[0].closed)) for other in found[1:]):
            remedy = "make models that differ in their arrays alone"
            raise ModelError(sentence("members of one structure", "models that compute differently", remedy))
        return _closed(found[0], state)

    def _step(self, form: Form) -> Callable[..., Any]:
        def losses(trained: Any, rest: Any, batch: Any, key: Any) -> tuple[Any, Any]:
            def run(model: Any) -> Any:
                return self.step(model, batch, **keyed(self.step, key))

            made, after = form.stepped(Parts(trained, rest), run, key, training=True)
            values = scalars(None, made)
            return values["loss"], (values, after)

        def step(state: State, batch: Any, key: Any, hyper: Any) -> tuple[State, dict[str, Any]]:
            slope = jax.value_and_grad(losses, has_aux=True)
            (_, (values, rest)), gradients = slope(state.trained, state.rest, batch, key)
            trained, optimizer = self.rule.updated(hyper, gradients, state.optimizer, state.trained)
            return State(trained, rest, optimizer), values

        return step

    def predicted(self, state: State, inputs: Any, key: Any) -> Traced:
        """(state, inputs, key) to predictions, in evaluation mode."""
        if isinstance(self.form, NestForm):
            remedy = "let init return carpool.jax.Model(parameters, apply)"
            raise ModelError(sentence("a model that can be called", "a nest of arrays", remedy))

        def predict(state: State, inputs: Any, key: Any) -> Any:
            return self.form.predicted(Parts(state.trained, state.rest), inputs, key, training=False)[0]

        return traced(predict, state, inputs, key)


def way_of(member: Traced, width: int) -> Formulation:
    """How a member's function becomes one of all members."""
    if width == 1:
        return ALONE
    return candidates(jax.default_backend())[0] if convolves(member) else MAPPED


def predict(member: Traced, way: Formulation) -> Callable[..., Any]:
    """All members' predictions, as (state, inputs, keys)."""

    def one(state: State, inputs: Any, key: Any) -> Any:
        own = jax.random.fold_in(key, np.uint32(_PREDICTED))
        return member.run((state, inputs, own), {}, way.operators)

    return way.each(one, (0, None, 0))


def advance(member: Traced, each: bool, many: bool, way: Formulation) -> Callable[..., Any]:
    """A step of all members, or many of them in one launch, as (state, sound, batch, keys, number, hyper, running).

    Who is not running, or not sound, or becomes so by this step, keeps every bit, and shows NaN from then on.
    """

    def one(
        state: State, sound: Any, batch: Any, key: Any, number: Any, hyper: Any, running: Any
    ) -> tuple[State, Any, dict[str, Any]]:
        after, values = member.run((state, batch, jax.random.fold_in(key, number), hyper), {}, way.operators)
        runs = running & sound
        sound = sound & (~runs | jnp.isfinite(values["loss"]))
        state = jax.tree.map(lambda new, old: jnp.where(runs & sound, new, old), after, state)
        return state, sound, {name: jnp.where(runs, value, _blank(value)) for name, value in values.items()}

    def step(*inputs: Any) -> Any:
        return way.each(one, (0, 0, 0 if each else None, 0, None, 0, 0))(*inputs)

    def steps(state: State, sound: Any, batches: Any, keys: Any, number: Any, *rest: Any) -> Any:
        def go_on(carried: Any, given: Any) -> Any:
            batch, number = given
            state, sound, shown = step(*carried, batch, keys, number, *rest)
            return (state, sound), shown

        numbers = number + jnp.arange(len(jax.tree.leaves(batches)[0]), dtype=number.dtype)
        (state, sound), shown = jax.lax.scan(go_on, (state, sound), (batches, numbers))
        return state, sound, shown

    return steps if many else step


def _blank(value: Any) -> Any:
    """What a member that takes no step shows."""
    return jnp.asarray(jnp.nan if jnp.issubdtype(value.dtype, jnp.inexact) else 0, value.dtype)


# What is given, checked


def checked_form(model: Any) -> Form:
    try:
        form = form_of(model)
    except Exception as error:  # a Linen module without variables, say: Flax tells what is wrong
        raise _no_model(described(error)) from error
    if form is None:
        raise _no_model(type(model).__name__)
    return form


def _no_model(received: str) -> ModelError:
    expected = "init(key) to return a nest of JAX arrays, a carpool.jax.Model, or a Flax or Equinox module"
    return ModelError(sentence(expected, received, "return one; bind a Linen module to its variables"))


def _closed(step: Traced, state: State) -> Traced:
    """The step, where the state that it leaves is one that it takes."""
    after, _ = jax.tree.unflatten(step.out_tree, step.closed.out_avals)
    kinds = {"trained": ModelError, "rest": ModelError, "optimizer": OptimizerError}
    for word, error in kinds.items():
        old, new = getattr(state, word), getattr(after, word)
        if (shown(old), jax.tree.structure(old)) != (shown(new), jax.tree.structure(new)):
            what = "optimizer state" if word == "optimizer" else "model"
            received = ", ".join({*shown(new)} - {*shown(old)}) or str(jax.tree.structure(new))
            remedy = "keep structure, shapes and types from step to step"
            raise error(sentence(f"a step that leaves the {what} as it is built", received, remedy))
    return step
