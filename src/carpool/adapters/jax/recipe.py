"""A job's step as traces: the gradient of its objective, its optimizer's update, and its validation. Equal traces make a stack."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from carpool.adapters.jax.build import Built, says
from carpool.adapters.jax.families import Families, Rule, apart
from carpool.adapters.jax.forms import Parts, keyed, moded
from carpool.adapters.jax.lift import Traced, traced
from carpool.errors import LossError
from carpool.fingerprint import fingerprint
from carpool.job import Job, check_names


class Recipes:
    """The traces of a run's jobs: what two jobs have in common is traced once."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Traced] = {}
        self._families = Families()
        self._rules: dict[Built, Rule] = {}
        self._owns: dict[Built, Hashable] = {}
        self._marks: dict[int, tuple[Any, Hashable]] = {}
        """Fingerprints of what jobs name in common, each beside its object, whose id stays taken."""

    def gradient(self, built: Built, size: int) -> Traced:
        """(trained, rest, batch, key) to (scalars by name, the rest afterwards, gradients)."""
        key = ("gradient", self._own(built), built.data.shapes, size)
        return self._traced(key, lambda: _gradient(built, size))

    def update(self, built: Built) -> Traced:
        """(gradients, optimizer's state, trained) to (trained, optimizer's state)."""
        return self._families.traced(self._rule(built))

    def confirm(self, builts: Sequence[Built]) -> None:
        """Makes sure that the updates of these jobs, which are to be one, are what they were told to be."""
        if len({id(self.update(built).closed) for built in builts}) < len(builts):
            self._families.confirm([self._rule(built) for built in builts])

    def evaluate(self, built: Built, size: int) -> Traced:
        """(trained, rest, batch, key) to scalars by name."""
        assert built.validation is not None
        key = ("evaluate", self._own(built), built.validation.shapes, size)
        return self._traced(key, lambda: _evaluate(built, size))

    def _rule(self, built: Built) -> Rule:
        if built not in self._rules:
            mark = fingerprint((built.optimizer.init, built.optimizer.update, built.job.clip_norm))
            held = shapes((built.parts.trained, built.state))
            self._rules[built] = Rule(held, apart(mark), lambda: _update(built))
        return self._rules[built]

    def _own(self, built: Built) -> Hashable:
        if built not in self._owns:
            job = built.job
            doing = tuple(map(self._mark, (job.loss, job.step, job.metrics)))
            self._owns[built] = (built.form.key, shapes(built.parts), doing)
        return self._owns[built]

    def _mark(self, named: Any) -> Hashable:
        if id(named) not in self._marks:
            self._marks[id(named)] = (named, fingerprint(named))
        return self._marks[id(named)][1]

    def _traced(self, key: Hashable, make: Callable[[], Traced]) -> Traced:
        try:
            hash(key)
        except TypeError:  # a module with something in it that cannot be compared: the trace tells
            return make()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Kind(NamedTuple):
    """What an array is."""

    shape: tuple[int, ...]
    type: Any


def shapes(nest: Any) -> tuple[Any, tuple[Kind, ...]]:
    """How a nest's arrays lie, and what each of them is."""
    leaves, tree = jax.tree.flatten(nest)
    return tree, tuple(Kind(jnp.shape(leaf), _type(leaf)) for leaf in leaves)


def _type(leaf: Any) -> Hashable:
    return leaf.dtype if isinstance(leaf, jax.Array | np.ndarray) else jax.typeof(leaf).dtype


# The three functions


def objective(built: Built, training: bool) -> Callable[..., tuple[dict[str, Any], Any]]:
    """(trained, rest, batch, key) to scalars by name, "loss" among them, and the rest afterwards."""
    job, form = built.job, built.form

    def stepped(trained: Any, rest: Any, batch: Any, key: Any) -> tuple[dict[str, Any], Any]:
        step = job.step
        assert step is not None
        given = {**keyed(step, key), **moded(step, training)}
        made, after = form.stepped(Parts(trained, rest), lambda m: step(m, batch, **given), key, training)
        return scalars(job, made), after

    def lossed(trained: Any, rest: Any, batch: Any, key: Any) -> tuple[dict[str, Any], Any]:
        assert job.loss is not None
        x, y = batch
        prediction, after = form.predicted(Parts(trained, rest), x, key, training)
        made = {"loss": job.loss(prediction, y)}
        made |= {name: metric(prediction, y) for name, metric in (job.metrics or {}).items()}
        return scalars(job, made), after

    return lossed if job.step is None else stepped


def _gradient(built: Built, size: int) -> Traced:
    compute = objective(built, training=True)

    def losses(trained: Any, rest: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        values, after = compute(trained, rest, batch, key)
        return values["loss"], (values, after)

    def gradient(trained: Any, rest: Any, batch: Any, key: Any) -> Any:
        (_, (values, after)), gradients = jax.value_and_grad(losses, has_aux=True)(trained, rest, batch, key)
        return values, after, gradients

    return traced(gradient, *_inputs(built, built.data.batch(size)))


def _update(built: Built) -> Traced:
    optimizer, norm = built.optimizer, built.job.clip_norm

    def update(gradients: Any, state: Any, trained: Any) -> Any:
        if norm is not None:
            gradients, _ = optax.clip_by_global_norm(norm).update(gradients, optax.EmptyState())
        updates, state = optimizer.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state

    return traced(update, built.parts.trained, built.state, built.parts.trained)


def _evaluate(built: Built, size: int) -> Traced:
    compute = objective(built, training=False)
    assert built.validation is not None

    def evaluate(trained: Any, rest: Any, batch: Any, key: Any) -> Any:
        return compute(trained, rest, batch, key)[0]

    return traced(evaluate, *_inputs(built, built.validation.batch(size)))


def _inputs(built: Built, batch: Any) -> tuple[Any, Any, Any, Any]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return built.parts.trained, built.parts.rest, batch, key


def scalars(job: Job | None, made: Any) -> dict[str, Any]:
    """What a step returned, as scalars by name."""
    values = made if isinstance(made, dict) else {"loss": made}
    check_names(job, values)
    if "loss" not in values:
        raise LossError(
            says(job, 'step to return a loss or a dict with "loss"', ", ".join(values), 'add "loss"')
        )
    for name, value in values.items():
        if not isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
            received = f"{name} is a {type(value).__name__}"
            raise LossError(says(job, f"{name} to be a number", received, "return a scalar array"))
        if jnp.ndim(value) != 0:
            raise LossError(
                says(
                    job, f"{name} to be a scalar", f"shape {jnp.shape(value)}", "reduce it, with .mean() say"
                )
            )
    return {name: jnp.asarray(value) for name, value in values.items()}
