"""Operations on elements: what each is called, and how Python computes it for constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from carpool.kernels.resident.loops import Const, Expr, Op, Type

_FOLDED: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "div": lambda a, b: a / b if b else math.nan,
}
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
TRUTHS = (*COMPARED, "and", "or", "xor", "not", "isnan", "isinf")
_OF_TRUTHS = {"mul": "and", "min": "and", "add": "or", "max": "or"}


def op(name: str, *args: Expr, type: Type | None = None) -> Expr:
    """An operation; of constants it is one."""
    made: Type = type or ("u1" if name in TRUTHS else args[-1].type)
    if made == "u1":
        name = _OF_TRUTHS.get(name, name)
    if name in _FOLDED and all(isinstance(arg, Const) for arg in args) and made in ("f8", "i8"):
        return Const(made, _FOLDED[name](*(arg.value for arg in args if isinstance(arg, Const))))
    if name == "mul" and any(isinstance(arg, Const) and arg.value == 1 for arg in args):
        return next(
            (
                other
                for other, arg in zip(reversed(args), args, strict=True)
                if isinstance(arg, Const) and arg.value == 1
            )
        )
    return Op(made, name, args)


def cast(expr: Expr, type: Type) -> Expr:
    """The element as another type."""
    if expr.type == type:
        return expr
    if isinstance(expr, Const):
        value = expr.value
        new = float(value) if type in ("f4", "f8") else bool(value) if type == "u1" else int(value)
        return Const(type, new)
    return Op(type, "cast", (expr,))
