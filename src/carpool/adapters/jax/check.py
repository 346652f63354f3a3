"""A row's step in its stack beside its step alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from carpool.adapters.base import Check

_UNPROVEN = frozenset(
    {"pallas_call", "ffi_call", "custom_vmap_call", "triton_kernel_call", "tpu_custom_call"}
)
"""Operations whose rule for stacks somebody wrote by hand."""
_OF_STEP, _OF_WEIGHTS = (
    1e-2,
    1e-6,
)  # how far the steps may be apart, in the norm of the step and of the weights


def is_unproven(jaxpr: Any) -> bool:
    """Whether a trace has operations that are not JAX's own, so that its stack is tried before it is believed."""
    return any(eqn.primitive.name in _UNPROVEN for eqn in _equations(jaxpr))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def compared(name: str, before: Any, alone: Any, together: Any) -> Check:
    """Whether two steps from one place end at the same place.

    By the norms of all weights at once: where a gradient is nothing but rounding, Adam's first step is as long as any other, either way.
    """
    start, one, other = (_joined(nest) for nest in (before, alone, together))
    difference, step = np.linalg.norm(one - other), np.linalg.norm(one - start)
    worst = float(np.max(np.abs(one - other), initial=0.0))
    is_same = difference <= _OF_STEP * step + _OF_WEIGHTS * np.linalg.norm(start)
    if is_same or not np.isfinite(one).all():
        return Check(1, worst, None)
    return Check(1, worst, f"{name!r}: weights differ by {worst:.1e} after a step")


def _joined(nest: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(nest)])
