"""Operators that put many elements together into one."""

from __future__ import annotations

from math import prod
from typing import Any

from carpool.kernels.resident.builder import Refused, Value
from carpool.kernels.resident.loops import Const, Scan
from carpool.kernels.resident.lower.pointwise import number, pointwise
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import cast, op


def _dims(value: Value, dims: Any) -> list[int]:
    if dims is None or dims == []:
        return list(range(len(value.shape)))
    return [dims] if isinstance(dims, int) else list(dims)


@lowers("aten.sum.default", "aten.sum.dim_IntList")
def total(call: Call, input: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return call.builder.reduced("sum", number(input, call.type), _dims(input, dim), keepdim)


@lowers("aten.mean.default", "aten.mean.dim")
def mean(call: Call, input: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    dims = _dims(input, dim)
    summed = call.builder.reduced("sum", number(input, call.type), dims, keepdim)
    count = prod(input.shape[dim] for dim in dims) if input.shape else 1
    return Value(summed.shape, op("div", summed.expr, cast(Const("f8", float(count)), call.type)))


@lowers("aten.amax.default", "aten.amin.default")
def extreme(call: Call, input: Value, dim: Any = (), keepdim: bool = False) -> Value:
    kind = "max" if "amax" in str(call.node.target) else "min"
    return call.builder.reduced(kind, input, _dims(input, list(dim)), keepdim)


@lowers("aten.max.default", "aten.min.default")
def extreme_of_all(call: Call, input: Value) -> Value:
    kind = "max" if "aten.max" in str(call.node.target) else "min"
    return call.builder.reduced(kind, input, _dims(input, None))


@lowers("aten.argmax.default", "aten.argmin.default")
def place(call: Call, input: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    kind = "argmax" if "argmax" in str(call.node.target) else "argmin"
    if dim is None:
        flat = call.builder.reshaped(input, (input.size,))
        return call.builder.reshaped(call.builder.reduced(kind, flat, [0]), call.shape)
    return call.builder.reduced(kind, input, [dim], keepdim)


@lowers("aten.max.dim", "aten.min.dim")
def extreme_and_place(call: Call, input: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    kind = "max" if "aten.max" in str(call.node.target) else "min"
    call.builder.stored(input)
    places = call.builder.reduced("argmax" if kind == "max" else "argmin", input, [dim], keepdim)
    return call.builder.reduced(kind, input, [dim], keepdim), places


@lowers("aten.prod.default", "aten.prod.dim_int")
def multiplied(call: Call, input: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return call.builder.reduced("prod", number(input, call.type), _dims(input, dim), keepdim)


@lowers(
    "aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims"
)
def holds(call: Call, input: Value, dim: Any = None, keepdim: bool = False) -> Value:
    kind = "max" if "aten.any" in str(call.node.target) else "min"
    counted = number(number(input, "u1"), "i4")
    return number(call.builder.reduced(kind, counted, _dims(input, dim), keepdim), "u1")


def spread(
    call: Call, input: Value, dims: list[int], correction: float, keepdim: bool
) -> tuple[Value, Value]:
    """Variance and mean, in two passes."""
    builder, kind = call.builder, input.type
    count = prod(input.shape[dim] for dim in dims)
    if count - correction <= 0:
        raise Refused("the variance of one number")
    builder.stored(input)
    summed = builder.reduced("sum", input, dims, True)
    middle = builder.stored(Value(summed.shape, op("div", summed.expr, Const(kind, float(count)))))
    apart = pointwise(builder, input.shape, lambda x, m: op("sub", x, m), input, middle)
    squares = Value(input.shape, op("mul", apart.expr, apart.expr))
    added = builder.reduced("sum", squares, dims, True)
    variance = Value(added.shape, op("div", added.expr, Const(kind, float(count - correction))))
    if keepdim:
        return variance, middle
    shape = tuple(
        size for dim, size in enumerate(input.shape) if dim not in [d % len(input.shape) for d in dims]
    )
    return builder.reshaped(variance, shape), builder.reshaped(middle, shape)


@lowers("aten.var_mean.correction", "aten.var.correction", "aten.std.correction")
def var_mean(
    call: Call, input: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    dims = _dims(input, dim)
    variance, middle = spread(call, input, dims, 1 if correction is None else correction, keepdim)
    name = str(call.node.target)
    if "var_mean" in name:
        return variance, middle
    return Value(variance.shape, op("sqrt", variance.expr)) if "std" in name else variance


@lowers("aten._softmax.default", "aten._log_softmax.default")
def softmax(call: Call, input: Value, dim: int, half_to_float: bool) -> Value:
    builder = call.builder
    builder.stored(input)
    top = builder.reduced("max", input, [dim], True)
    apart = pointwise(builder, input.shape, lambda x, m: op("sub", x, m), input, top)
    if "log" in str(call.node.target):
        powers = Value(apart.shape, op("exp", apart.expr))
        summed = builder.reduced("sum", powers, [dim], True)
        summed = builder.stored(Value(summed.shape, op("log", summed.expr)))
        return pointwise(builder, input.shape, lambda x, s: op("sub", x, s), apart, summed)
    powers = builder.stored(Value(apart.shape, op("exp", apart.expr)))
    summed = builder.reduced("sum", powers, [dim], True)
    return pointwise(builder, input.shape, lambda x, s: op("div", x, s), powers, summed)


@lowers("aten._softmax_backward_data.default")
def softmax_backward(call: Call, grad: Value, output: Value, dim: int, dtype: Any) -> Value:
    builder = call.builder
    both = builder.stored(pointwise(builder, call.shape, lambda g, y: op("mul", g, y), grad, output))
    summed = builder.reduced("sum", both, [dim], True)
    return pointwise(builder, call.shape, lambda b, y, s: op("sub", b, op("mul", y, s)), both, output, summed)


@lowers("aten._log_softmax_backward_data.default")
def log_softmax_backward(call: Call, grad: Value, output: Value, dim: int, dtype: Any) -> Value:
    builder = call.builder
    builder.stored(grad)
    summed = builder.reduced("sum", grad, [dim], True)
    return pointwise(
        builder,
        call.shape,
        lambda g, y, s: op("sub", g, op("mul", op("exp", y), s)),
        grad,
        output,
        summed,
    )


@lowers("aten.cumsum.default", "aten.cumprod.default")
def accumulated(call: Call, input: Value, dim: int, **_: Any) -> Value:
    """Along a dimension, each with all before it."""
    builder, value = call.builder, number(input, call.type)
    if not call.shape:
        return value
    last = [d for d in range(len(call.shape)) if d != dim % len(call.shape)] + [dim % len(call.shape)]
    turned = builder.permuted(value, last)
    array = builder.array(call.type, call.shape)
    made = builder.lying(array)
    kind = "sum" if "cumsum" in str(call.node.target) else "prod"
    place = builder.place(builder.permuted(made, last))
    builder.statements.append(Scan(kind, turned.shape, turned.expr, place))
    return made
