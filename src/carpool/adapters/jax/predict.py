"""Predictions of many JAX models: those of one structure in one launch a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.jax import programs
from carpool.adapters.jax.devices import chosen, device_of
from carpool.adapters.jax.forms import Form, Parts, form_of
from carpool.adapters.jax.formulation import candidates, convolves
from carpool.adapters.jax.lift import Traced, lifted, traced
from carpool.adapters.jax.program import ALONE, MAPPED
from carpool.errors import DataError, ModelError, sentence


def predict(models: Sequence[Any], inputs: Any, batch_size: int | None, device: str) -> list[Any]:
    """Each model's outputs in evaluation mode, as arrays on the device."""
    place = device_of(chosen(device))
    forms = [_form(model) for model in models]
    parts = [form.split(model) for form, model in zip(forms, models, strict=True)]
    batches = [jax.device_put(batch, place) for batch in _batches(inputs, batch_size)]
    made: list[list[Any]] = [[] for _ in models]
    for batch in batches:
        groups: dict[Any, list[tuple[int, Traced]]] = {}
        for number, (form, own) in enumerate(zip(forms, parts, strict=True)):
            trace = _traced(form, own, batch)
            groups.setdefault((trace.text, _shapes(own)), []).append((number, trace))
        for group in groups.values():
            outputs = _outputs([trace for _, trace in group], [parts[i] for i, _ in group], batch, place)
            for (number, _), output in zip(group, outputs, strict=True):
                made[number].append(output)
    return [jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *outputs) for outputs in made]


def _form(model: Any) -> Form:
    form = form_of(model)
    if form is None or not form.is_callable:
        remedy = "pass a module, or carpool.jax.Model(parameters, apply)"
        raise ModelError(sentence("a JAX model that can be called", type(model).__name__, remedy))
    return form


def _batches(inputs: Any, size: int | None) -> list[Any]:
    leaves, tree = jax.tree.flatten(inputs)
    lengths = {len(leaf) if np.ndim(leaf) else 0 for leaf in leaves}
    if len(lengths) != 1 or lengths == {0}:
        raise DataError(
            sentence("inputs of one length", f"lengths {sorted(lengths)}", "align the first dimensions")
        )
    length = lengths.pop()
    step = size or length
    return [
        jax.tree.unflatten(tree, [np.asarray(leaf)[start : start + step] for leaf in leaves])
        for start in range(0, length, step)
    ]


def _traced(form: Form, parts: Parts, batch: Any) -> Traced:
    key = jax.eval_shape(lambda: jax.random.key(0))

    def function(trained: Any, rest: Any, batch: Any, key: Any) -> Any:
        return form.predicted(Parts(trained, rest), batch, key, training=False)[0]

    return traced(function, parts.trained, parts.rest, batch, key)


def _outputs(traces: Sequence[Traced], parts: Sequence[Parts], batch: Any, place: Any) -> list[Any]:
    """Of models that differ in arrays and numbers alone."""
    function = lifted(traces)
    way = ALONE if len(traces) == 1 else candidates(place.platform)[0] if convolves(traces[0]) else MAPPED
    host = jax.device_get(list(parts))
    stack = jax.device_put(jax.tree.map(lambda *leaves: np.stack(leaves), *host), place)
    inputs = (stack, batch, jax.device_put(function.columns, place))

    def run(stack: Parts, batch: Any, numbers: Any) -> Any:
        def one(own: Parts, batch: Any, numbers: Any) -> Any:
            return function.run((own.trained, own.rest, batch, jax.random.key(0)), numbers, way.operators)

        return way.each(one, (0, None, 0))(stack, batch, numbers)

    key = ("predict", way.name, len(traces), function.key)
    made = programs.program(key, lambda: run, inputs, donated=False).result()(*inputs)
    return [jax.tree.map(lambda leaf, row=row: leaf[row], made) for row in range(len(traces))]


def _shapes(nest: Any) -> Any:
    leaves, tree = jax.tree.flatten(nest)
    return tree, tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
