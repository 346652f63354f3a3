"""Matrix products and convolutions."""

from __future__ import annotations

from typing import Any

from carpool.kernels.resident.builder import Value
from carpool.kernels.resident.loops import Const
from carpool.kernels.resident.lower.pointwise import pointwise
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import cast, op


@lowers("aten.mm.default", "aten.bmm.default")
def product(call: Call, left: Value, right: Value) -> Value:
    return call.builder.product(left, right)


@lowers("aten.addmm.default", "aten.baddbmm.default")
def added(call: Call, bias: Value, left: Value, right: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    made = call.builder.product(left, right)
    b, a = (cast(Const("f8", float(given)), call.type) for given in (beta, alpha))
    return pointwise(
        call.builder,
        call.shape,
        lambda x, y: op("add", op("mul", x, b), op("mul", y, a)),
        bias,
        made,
    )


@lowers("aten.mv.default")
def by_vector(call: Call, matrix: Value, vector: Value) -> Value:
    made = call.builder.product(matrix, call.builder.unsqueezed(vector, 1))
    return call.builder.squeezed(made, 1)


@lowers("aten.dot.default")
def dot(call: Call, left: Value, right: Value) -> Value:
    both = pointwise(call.builder, left.shape, lambda a, b: op("mul", a, b), left, right)
    return call.builder.reduced("sum", both, [0])
