"""Random numbers that are keyed by seed, step and call."""

from __future__ import annotations

from typing import Any

from carpool.kernels.resident.builder import Refused, Value
from carpool.kernels.resident.loops import Draw
from carpool.kernels.resident.lower.pointwise import number
from carpool.kernels.resident.lower.table import Call, lowers


@lowers("carpool.uniform.default")
def uniform(call: Call, seed: Value, step: Value, number_of_call: int, count: int, device: Any) -> Value:
    if seed.shape or step.shape:
        raise Refused("random numbers of several members")
    array = call.builder.array("f4", (count,))
    own = (number(seed, "i8").expr, number(step, "i8").expr)
    call.builder.statements.append(Draw(array, count, *own, number_of_call))
    return call.builder.lying(array)
