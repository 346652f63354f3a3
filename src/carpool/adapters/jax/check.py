"""A row's step in its stack beside its step alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from carpool import fidelity
from carpool.adapters.base import Check
from carpool.fidelity import tolerance

_UNPROVEN = frozenset(
    {"pallas_call", "ffi_call", "custom_vmap_call", "triton_kernel_call", "tpu_custom_call"}
)
"""Operations whose rule for stacks somebody wrote by hand."""


def is_unproven(jaxpr: Any) -> bool:
    """Whether a trace has operations that are not JAX's own, so that its stack is tried before it is believed."""
    return any(eqn.primitive.name in _UNPROVEN for eqn in _equations(jaxpr))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def floating(jaxpr: Any) -> set[str]:
    """The names of the floating types in which a trace computes."""
    made = (getattr(out.aval, "dtype", None) for eqn in _equations(jaxpr) for out in eqn.outvars)
    return {str(kind) for kind in made if kind is not None and jnp.issubdtype(kind, jnp.inexact)}


def compared(name: str, before: Any, alone: Any, together: Any, lowest: str) -> Check:
    """Whether two steps from one place end at the same place.

    `lowest` is the type in which they compute least precisely. By the norms of all weights at once: where a gradient is nothing but rounding, Adam's first step is as long as any other, either way.
    """
    start, one, other = (_joined(nest) for nest in (before, alone, together))
    difference, step = np.linalg.norm(one - other), np.linalg.norm(one - start)
    worst = float(np.max(np.abs(one - other), initial=0.0))
    weights = fidelity.lowest(str(leaf.dtype) for leaf in jax.tree.leaves(before))
    ground = tolerance(weights).ground * np.linalg.norm(start)
    is_same = difference <= tolerance(lowest).norm * step + ground
    if is_same or not np.isfinite(one).all():
        return Check(1, worst, None)
    return Check(1, worst, f"{name!r}: weights differ by {worst:.1e} after a step")


def _joined(nest: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(nest)])
