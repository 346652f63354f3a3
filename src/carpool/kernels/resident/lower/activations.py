"""Activations and their gradients, in torch's own arithmetic."""

from __future__ import annotations

import math
from struct import pack, unpack

from carpool.kernels.resident.builder import Value
from carpool.kernels.resident.loops import Const, Expr, Type
from carpool.kernels.resident.lower.pointwise import pointwise
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import cast, op


@lowers("aten.relu.default")
def relu(call: Call, input: Value) -> Value:
    return Value(input.shape, op("max", input.expr, Const(call.type, 0.0)))


@lowers("aten.gelu.default")
def gelu(call: Call, input: Value, approximate: str = "none") -> Value:
    x, one, half = input.expr, Const(call.type, 1.0), Const(call.type, 0.5)
    if approximate == "tanh":
        inner = _gelu_inner(call.type, x)
        return Value(input.shape, op("mul", op("mul", half, x), op("add", one, op("tanh", inner))))
    scaled = op("mul", x, Const(call.type, math.sqrt(0.5)))
    return Value(input.shape, op("mul", op("mul", half, x), op("add", one, op("erf", scaled))))


def _gelu_inner(type: Type, x: Expr) -> Expr:
    cube = op("mul", op("mul", x, x), x)
    inside = op("add", x, op("mul", Const(type, 0.044715), cube))
    return op("mul", Const(type, math.sqrt(2 / math.pi)), inside)


@lowers("aten.gelu_backward.default")
def gelu_backward(call: Call, grad: Value, input: Value, approximate: str = "none") -> Value:
    type, one, half = call.type, Const(call.type, 1.0), Const(call.type, 0.5)

    def exact(g: Expr, x: Expr) -> Expr:
        share = op("mul", half, op("add", one, op("erf", op("mul", x, Const(type, math.sqrt(0.5))))))
        bell = op("exp", op("mul", op("mul", x, x), Const(type, -0.5)))
        density = op("mul", bell, Const(type, 1 / math.sqrt(2 * math.pi)))
        return op("mul", g, op("add", share, op("mul", x, density)))

    def rough(g: Expr, x: Expr) -> Expr:
        bent = op("tanh", _gelu_inner(type, x))
        slope = op("add", one, op("mul", Const(type, 3 * 0.044715), op("mul", x, x)))
        inner = op("mul", Const(type, math.sqrt(2 / math.pi)), slope)
        left = op("mul", half, op("add", one, bent))
        right = op("mul", op("mul", half, x), op("mul", op("sub", one, op("mul", bent, bent)), inner))
        return op("mul", g, op("add", left, right))

    return pointwise(call.builder, call.shape, rough if approximate == "tanh" else exact, grad, input)


@lowers("aten.silu.default")
def silu(call: Call, input: Value) -> Value:
    return Value(input.shape, op("mul", input.expr, op("sigmoid", input.expr)))


@lowers("aten.silu_backward.default")
def silu_backward(call: Call, grad: Value, input: Value) -> Value:
    one = Const(call.type, 1.0)

    def made(g: Expr, x: Expr) -> Expr:
        s = op("sigmoid", x)
        return op("mul", g, op("mul", s, op("add", one, op("mul", x, op("sub", one, s)))))

    return pointwise(call.builder, call.shape, made, grad, input)


@lowers("aten.leaky_relu.default")
def leaky_relu(call: Call, input: Value, slope: float = 0.01) -> Value:
    x, low = input.expr, cast(Const("f8", float(slope)), call.type)
    positive = op("gt", x, Const(call.type, 0.0))
    return Value(input.shape, op("where", positive, x, op("mul", x, low)))


@lowers("aten.leaky_relu_backward.default")
def leaky_relu_backward(call: Call, grad: Value, input: Value, slope: float, is_result: bool) -> Value:
    low = cast(Const("f8", float(slope)), call.type)

    def made(g: Expr, x: Expr) -> Expr:
        return op("where", op("gt", x, Const(call.type, 0.0)), g, op("mul", g, low))

    return pointwise(call.builder, call.shape, made, grad, input)


@lowers("aten.elu.default")
def elu(call: Call, input: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    x = input.expr
    a, s, i = (cast(Const("f8", float(given)), call.type) for given in (alpha, scale, input_scale))
    negative = op("mul", op("mul", a, op("expm1", op("mul", x, i))), s)
    return Value(input.shape, op("where", op("gt", x, Const(call.type, 0.0)), op("mul", x, s), negative))


@lowers("aten.elu_backward.default")
def elu_backward(
    call: Call, grad: Value, alpha: float, scale: float, input_scale: float, is_result: bool, given: Value
) -> Value:
    a, s, i = (cast(Const("f8", float(one)), call.type) for one in (alpha, scale, input_scale))

    def made(g: Expr, x: Expr) -> Expr:
        if is_result:
            low = op("mul", i, op("add", x, op("mul", a, s)))
        else:
            low = op("mul", op("mul", op("mul", i, a), s), op("exp", op("mul", x, i)))
        above = op("gt", x, Const(call.type, 0.0))
        return op("mul", g, op("where", above, s, low))

    return pointwise(call.builder, call.shape, made, grad, given)


@lowers("aten.softplus.default")
def softplus(call: Call, input: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    b, t = (cast(Const("f8", float(given)), call.type) for given in (beta, threshold))
    scaled = op("mul", input.expr, b)
    soft = op("div", op("log1p", op("exp", scaled)), b)
    return Value(input.shape, op("where", op("gt", scaled, t), input.expr, soft))


@lowers("aten.softplus_backward.default")
def softplus_backward(call: Call, grad: Value, input: Value, beta: float, threshold: float) -> Value:
    b, t = (cast(Const("f8", float(given)), call.type) for given in (beta, threshold))

    def made(g: Expr, x: Expr) -> Expr:
        scaled = op("mul", x, b)
        return op("where", op("gt", scaled, t), g, op("mul", g, op("sigmoid", scaled)))

    return pointwise(call.builder, call.shape, made, grad, input)


@lowers("aten.hardsigmoid_backward.default")
def hardsigmoid_backward(call: Call, grad: Value, input: Value) -> Value:
    """With torch's own sixth, which is float32's also where numbers are float64."""
    three, zero = Const(call.type, 3.0), Const(call.type, 0.0)
    sixth = Const(call.type, unpack("f", pack("f", 1 / 6))[0])

    def made(g: Expr, x: Expr) -> Expr:
        inside = op("and", op("gt", x, op("neg", three)), op("lt", x, three))
        return op("where", inside, op("mul", g, sixth), zero)

    return pointwise(call.builder, call.shape, made, grad, input)


@lowers("aten.threshold_backward.default")
def threshold_backward(call: Call, grad: Value, input: Value, threshold: float) -> Value:
    zero = Const(call.type, 0.0)
    return pointwise(
        call.builder,
        call.shape,
        lambda g, x: op("where", op("le", x, cast(Const("f8", float(threshold)), call.type)), zero, g),
        grad,
        input,
    )


@lowers("aten.tanh_backward.default")
def tanh_backward(call: Call, grad: Value, output: Value) -> Value:
    one = Const(call.type, 1.0)
    return pointwise(
        call.builder, call.shape, lambda g, y: op("mul", g, op("sub", one, op("mul", y, y))), grad, output
    )


@lowers("aten.sigmoid_backward.default")
def sigmoid_backward(call: Call, grad: Value, output: Value) -> Value:
    one = Const(call.type, 1.0)
    return pointwise(
        call.builder,
        call.shape,
        lambda g, y: op("mul", op("mul", g, y), op("sub", one, y)),
        grad,
        output,
    )


@lowers("aten.softshrink_backward.default", "aten.hardshrink_backward.default")
def shrink_backward(call: Call, grad: Value, input: Value, limit: float) -> Value:
    bound, zero = cast(Const("f8", float(limit)), call.type), Const(call.type, 0.0)

    def made(g: Expr, x: Expr) -> Expr:
        return op("where", op("le", op("abs", x), bound), zero, g)

    return pointwise(call.builder, call.shape, made, grad, input)
