"""Operators that compute each element by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from carpool.kernels.resident.builder import Builder, Refused, Value
from carpool.kernels.resident.loops import Const, Expr, Type
from carpool.kernels.resident.lower.table import TYPES, Call, lowers
from carpool.kernels.resident.operations import cast, op

_WIDTH: dict[Type, int] = {"u1": 0, "i4": 1, "i8": 2, "f4": 3, "f8": 4}


def pointwise(builder: Builder, shape: tuple[int, ...], made: Callable[..., Expr], *args: Any) -> Value:
    """Each element by `made` from the elements of its arguments, which are broadcast."""
    return Value(shape, made(*(builder.expanded(arg, shape).expr for arg in args)))


def number(given: Any, type: Type) -> Value:
    """A Python number or a value, as one of this type."""
    if isinstance(given, Value):
        return Value(given.shape, cast(given.expr, type))
    if isinstance(given, int | float | bool):
        return Value((), cast(Const("f8", given), type))
    raise Refused(f"an argument of type {given.__class__.__name__}")


def wider(*args: Any) -> Type:
    """The type in which values are compared."""
    types: list[Type] = [arg.type for arg in args if isinstance(arg, Value) and arg.shape] or [
        arg.type for arg in args if isinstance(arg, Value)
    ]
    found: Type = max(types, key=lambda type: _WIDTH[type])
    has_fraction = any(isinstance(arg, float) for arg in args)
    return "f4" if has_fraction and found not in ("f4", "f8") else found


def _arithmetic(name: str, *aten: str) -> None:
    @lowers(*aten)
    def lower(call: Call, *args: Any) -> Value:
        own = [number(arg, call.type) for arg in args]
        return pointwise(call.builder, call.shape, lambda *exprs: op(name, *exprs), *own)


for _name, _aten in {
    "mul": ("aten.mul.Tensor", "aten.mul.Scalar"),
    "div": ("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor"),
    "max": ("aten.maximum.default",),
    "min": ("aten.minimum.default",),
    "neg": ("aten.neg.default",),
    "abs": ("aten.abs.default",),
    "exp": ("aten.exp.default",),
    "expm1": ("aten.expm1.default",),
    "log": ("aten.log.default",),
    "log1p": ("aten.log1p.default",),
    "log2": ("aten.log2.default",),
    "sqrt": ("aten.sqrt.default",),
    "rsqrt": ("aten.rsqrt.default",),
    "tanh": ("aten.tanh.default",),
    "sigmoid": ("aten.sigmoid.default",),
    "erf": ("aten.erf.default",),
    "erfc": ("aten.erfc.default",),
    "sin": ("aten.sin.default",),
    "cos": ("aten.cos.default",),
    "tan": ("aten.tan.default",),
    "asin": ("aten.asin.default",),
    "acos": ("aten.acos.default",),
    "atan": ("aten.atan.default",),
    "asinh": ("aten.asinh.default",),
    "acosh": ("aten.acosh.default",),
    "atanh": ("aten.atanh.default",),
    "exp2": ("aten.exp2.default",),
    "log10": ("aten.log10.default",),
    "hypot": ("aten.hypot.default",),
    "copysign": ("aten.copysign.Tensor", "aten.copysign.Scalar"),
    "sinh": ("aten.sinh.default",),
    "cosh": ("aten.cosh.default",),
    "floor": ("aten.floor.default",),
    "ceil": ("aten.ceil.default",),
    "trunc": ("aten.trunc.default",),
    "round": ("aten.round.default",),
    "fmod": ("aten.fmod.Scalar", "aten.fmod.Tensor"),
    "rem": ("aten.remainder.Scalar", "aten.remainder.Tensor"),
    "atan2": ("aten.atan2.default",),
}.items():
    _arithmetic(_name, *_aten)


def _compared(name: str) -> None:
    @lowers(f"aten.{name}.Tensor", f"aten.{name}.Scalar")
    def lower(call: Call, left: Any, right: Any) -> Value:
        type = wider(left, right)
        return pointwise(
            call.builder, call.shape, lambda a, b: op(name, a, b), number(left, type), number(right, type)
        )


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _compared(_name)


def _truth(name: str, *aten: str) -> None:
    @lowers(*aten)
    def lower(call: Call, *args: Any) -> Value:
        if call.type != "u1":
            raise Refused("bits of integers")
        own = [number(arg, "u1") for arg in args]
        return pointwise(call.builder, call.shape, lambda *exprs: op(name, *exprs), *own)


for _name, _aten in {
    "and": ("aten.logical_and.default", "aten.bitwise_and.Tensor", "aten.__and__.Tensor"),
    "or": ("aten.logical_or.default", "aten.bitwise_or.Tensor", "aten.__or__.Tensor"),
    "xor": ("aten.logical_xor.default", "aten.bitwise_xor.Tensor"),
    "not": ("aten.logical_not.default", "aten.bitwise_not.default"),
}.items():
    _truth(_name, *_aten)


@lowers("aten.__lshift__.Scalar", "aten.bitwise_left_shift.Tensor_Scalar")
def shifted(call: Call, input: Value, places: int) -> Value:
    return Value(input.shape, op("mul", number(input, call.type).expr, Const(call.type, 1 << places)))


@lowers("aten.isnan.default", "aten.isinf.default")
def is_not_finite(call: Call, input: Value) -> Value:
    name = "isnan" if "isnan" in str(call.node.target) else "isinf"
    return Value(input.shape, op(name, input.expr))


@lowers("aten.add.Tensor", "aten.add.Scalar")
def add(call: Call, left: Any, right: Any, alpha: Any = 1) -> Value:
    return _sum(call, "add", left, right, alpha)


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def sub(call: Call, left: Any, right: Any, alpha: Any = 1) -> Value:
    return _sum(call, "sub", left, right, alpha)


@lowers("aten.rsub.Scalar", "aten.rsub.Tensor")
def rsub(call: Call, left: Any, right: Any, alpha: Any = 1) -> Value:
    return _sum(call, "sub", right, left, alpha)


def _sum(call: Call, name: str, left: Any, right: Any, alpha: Any) -> Value:
    a, b, scale = (number(given, call.type) for given in (left, right, alpha))
    return pointwise(call.builder, call.shape, lambda a, b, s: op(name, a, op("mul", b, s)), a, b, scale)


@lowers("aten.reciprocal.default")
def reciprocal(call: Call, input: Value) -> Value:
    own = number(input, call.type)
    return Value(own.shape, op("div", Const(call.type, 1.0), own.expr))


@lowers("aten.sign.default", "aten.sgn.default")
def sign(call: Call, input: Value) -> Value:
    zero, one = Const(call.type, 0), Const(call.type, 1)
    positive = op("where", op("gt", input.expr, zero), one, zero)
    negative = op("where", op("lt", input.expr, zero), one, zero)
    return Value(input.shape, op("sub", positive, negative))


@lowers("aten.square.default")
def square(call: Call, input: Value) -> Value:
    return Value(input.shape, op("mul", input.expr, input.expr))


@lowers("aten.pow.Tensor_Scalar")
def power(call: Call, input: Value, exponent: float) -> Value:
    x = number(input, call.type).expr
    if exponent in (2, 3, 4):
        squared = op("mul", x, x)
        made = {2: squared, 3: op("mul", squared, x), 4: op("mul", squared, squared)}[int(exponent)]
    elif exponent == 1:
        made = x
    elif exponent == 0:
        made = Const(call.type, 1.0)
    elif exponent == 0.5:
        made = op("sqrt", x)
    elif exponent == -0.5:
        made = op("div", Const(call.type, 1.0), op("sqrt", x))
    elif exponent == -1:
        made = op("div", Const(call.type, 1.0), x)
    else:
        made = op("pow", x, cast(Const("f8", float(exponent)), call.type))
    return Value(input.shape, made)


@lowers("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def powers(call: Call, base: Any, exponent: Any) -> Value:
    own = [number(given, call.type) for given in (base, exponent)]
    return pointwise(call.builder, call.shape, lambda a, b: op("pow", a, b), *own)


@lowers("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def where(call: Call, condition: Value, yes: Any, no: Any) -> Value:
    own = [number(condition, "u1"), number(yes, call.type), number(no, call.type)]
    return pointwise(call.builder, call.shape, lambda c, a, b: op("where", c, a, b), *own)


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(call: Call, input: Value, mask: Value, value: Any) -> Value:
    return where(call, mask, value, input)


@lowers("aten.clamp.default", "aten.clamp.Tensor", "aten.hardtanh.default")
def clamp(call: Call, input: Value, min: Any = None, max: Any = None) -> Value:
    if str(call.node.target).startswith("aten.hardtanh"):
        min, max = -1.0 if min is None else min, 1.0 if max is None else max
    made = number(input, call.type)
    if min is not None:
        made = pointwise(call.builder, call.shape, lambda a, b: op("max", a, b), made, number(min, call.type))
    if max is not None:
        made = pointwise(call.builder, call.shape, lambda a, b: op("min", a, b), made, number(max, call.type))
    return made


@lowers("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(call: Call, input: Value, min: Any) -> Value:
    return clamp(call, input, min, None)


@lowers("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(call: Call, input: Value, max: Any) -> Value:
    return clamp(call, input, None, max)


@lowers("aten.lerp.Tensor", "aten.lerp.Scalar")
def lerp(call: Call, start: Value, end: Value, weight: Any) -> Value:
    """In torch's own arithmetic: from the nearer end."""

    def made(a: Expr, b: Expr, w: Expr) -> Expr:
        way, one = op("sub", b, a), Const(call.type, 1.0)
        near = op("add", a, op("mul", w, way))
        far = op("sub", b, op("mul", way, op("sub", one, w)))
        return op("where", op("lt", op("abs", w), Const(call.type, 0.5)), near, far)

    own = [number(given, call.type) for given in (start, end, weight)]
    return pointwise(call.builder, call.shape, made, *own)


@lowers("aten.addcmul.default")
def addcmul(call: Call, input: Value, left: Value, right: Value, value: Any = 1) -> Value:
    def made(x: Expr, a: Expr, b: Expr, v: Expr) -> Expr:
        return op("add", x, op("mul", v, op("mul", a, b)))

    own = [number(given, call.type) for given in (input, left, right, value)]
    return pointwise(call.builder, call.shape, made, *own)


@lowers("aten.addcdiv.default")
def addcdiv(call: Call, input: Value, left: Value, right: Value, value: Any = 1) -> Value:
    def made(x: Expr, a: Expr, b: Expr, v: Expr) -> Expr:
        return op("add", x, op("mul", v, op("div", a, b)))

    own = [number(given, call.type) for given in (input, left, right, value)]
    return pointwise(call.builder, call.shape, made, *own)


@lowers("aten._to_copy.default", "prims.convert_element_type.default")
def to_copy(call: Call, input: Value, *_: Any, **__: Any) -> Value:
    return number(input, call.type)


@lowers(
    "aten.clone.default", "aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default",
    "aten.contiguous.default", "aten.lift_fresh.default", "prims.view_of.default",
)  # fmt: skip
def same(call: Call, input: Value, **_: Any) -> Value:
    return input


@lowers("aten.copy.default", "aten.copy_.default")
def copied(call: Call, input: Value, source: Value, *_: Any) -> Value:
    return call.builder.expanded(number(source, call.type), call.shape)


@lowers(
    "aten.full.default", "aten.full_like.default", "aten.zeros.default", "aten.zeros_like.default",
    "aten.ones.default", "aten.ones_like.default", "aten.new_zeros.default", "aten.new_ones.default",
    "aten.new_full.default", "aten.scalar_tensor.default", "aten.empty.memory_format",
    "aten.new_empty.default", "aten.new_empty_strided.default", "aten.empty_strided.default",
    "aten.empty_like.default",
)  # fmt: skip
def filled(call: Call, *args: Any, **_: Any) -> Value:
    name = str(call.node.target)
    value = 1 if "ones" in name else 0
    if "full" in name:
        value = args[-1] if not isinstance(args[-1], Value) else None
    elif "scalar_tensor" in name:
        value = args[0]
    if not isinstance(value, int | float):
        raise Refused("a value that is computed")
    kind = TYPES.get(call.made.dtype)
    if kind is None:
        raise Refused(f"numbers of type {call.made.dtype}")
    return Value(call.shape, cast(Const("f8", value), kind))
