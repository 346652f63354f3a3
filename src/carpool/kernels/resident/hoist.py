"""What is the same for all elements of a loop, computed before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from carpool.kernels.resident.elements import Once
from carpool.kernels.resident.loops import Const, Expr, Load, Map, Op, Out, Product, Reduce, Statement


class _Hoist:
    """Takes what is the same for all elements out of a statement's expressions."""

    def __init__(self) -> None:
        self._fixed: dict[int, tuple[Expr, bool]] = {}
        self._known: dict[str, Once] = {}
        self.found: list[tuple[Once, Expr]] = []

    def outs(self, outs: Sequence[Out], inverts: bool = True) -> tuple[Out, ...]:
        memo: dict[int, Expr] = {}
        return tuple(Out(out.place, self.taken(out.value, memo, inverts)) for out in outs)

    def taken(self, expr: Expr, memo: dict[int, Expr], inverts: bool = True) -> Expr:
        """The expression without what is fixed in it. A division by that is a product, if so wished."""
        if id(expr) not in memo:
            memo[id(expr)] = self._taken(expr, memo, inverts)
        return memo[id(expr)]

    def _taken(self, expr: Expr, memo: dict[int, Expr], inverts: bool) -> Expr:
        if self._is_fixed(expr):
            return expr if isinstance(expr, Const) else self._once(expr)
        if not isinstance(expr, Op):
            return expr
        left = [self.taken(arg, memo, inverts) for arg in expr.args]
        divides = expr.name == "div" and expr.type in ("f4", "f8") and self._is_fixed(expr.args[1])
        if divides and inverts:
            inverse = Op(expr.type, "div", (Const(expr.type, 1.0), expr.args[1]))
            return Op(expr.type, "mul", (left[0], self._once(inverse)))
        return replace(expr, args=tuple(left))

    def _is_fixed(self, expr: Expr) -> bool:
        if id(expr) not in self._fixed:
            if isinstance(expr, Op):
                found = all(map(self._is_fixed, expr.args))
            elif isinstance(expr, Load):
                found = not any(expr.place.strides)
            else:
                found = isinstance(expr, Const | Once)
            self._fixed[id(expr)] = (expr, found)
        return self._fixed[id(expr)][1]

    def _once(self, expr: Expr) -> Once:
        key = _key(expr)
        if key not in self._known:
            self._known[key] = Once(expr.type, f"once{len(self._known)}")
            self.found.append((self._known[key], expr))
        return self._known[key]


def _key(expr: Expr) -> str:
    """The same text for expressions that compute the same."""
    if isinstance(expr, Op):
        return f"{expr.name}:{expr.type}({','.join(map(_key, expr.args))})"
    if isinstance(expr, Load):
        return f"{expr.place.array.name}+{expr.place.offset}"
    return f"{expr.type}:{getattr(expr, 'value', '')}"


def hoisted(statement: Statement) -> tuple[Statement, list[tuple[Once, Expr]]]:
    """The statement without what is the same for all its elements, and that."""
    hoist = _Hoist()
    if isinstance(statement, Map | Product):
        return replace(statement, outs=hoist.outs(statement.outs)), hoist.found
    if isinstance(statement, Reduce):  # a mean is of few numbers what a sum is of many: it is divided itself
        outs, value = hoist.outs(statement.outs, inverts=False), hoist.taken(statement.value, {})
        return replace(statement, outs=outs, value=value), hoist.found
    return statement, []
