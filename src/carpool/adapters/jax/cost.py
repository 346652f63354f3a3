"""About how long a step takes, from its trace: enough to keep launches short where steps are long."""

from __future__ import annotations

from math import prod
from typing import Any

from carpool.adapters.jax.telling import inner

_PER_SECOND = {"cpu": 5e10, "gpu": 3e13}  # multiplications and additions, roughly
_LAUNCH_S = 2.0  # how long a launch may take: so long Ctrl-C waits, and whoever shares the device


def most_steps(closed: Any, members: int, platform: str, most: int) -> int:
    """Steps of so many members that a launch should have, at most `most`."""
    step_s = members * operations(closed) / _PER_SECOND.get(platform, _PER_SECOND["gpu"])
    return max(1, min(most, int(_LAUNCH_S / max(step_s, 1e-9))))


def operations(closed: Any) -> float:
    """Multiplications and additions in the products and convolutions of a trace."""
    total = 0.0
    for eqn in closed.jaxpr.eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        total += times * sum(operations(one) for one in inner(eqn))
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2.0 * prod(eqn.outvars[0].aval.shape) * prod(shape[axis] for axis in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
            total += 2.0 * prod(eqn.outvars[0].aval.shape) * prod(kernel) / kernel[spec[0]]
    return total
