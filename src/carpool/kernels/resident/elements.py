"""Elements printed as C: expressions as constants, single ones or by lanes of a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from carpool.kernels.resident.loops import (
    Acc,
    Along,
    Const,
    Expr,
    Gather,
    Iota,
    Load,
    Op,
    Out,
    Place,
    Shape,
    Type,
)
from carpool.kernels.resident.operations import COMPARED

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Once(Expr):
    """What is the same for all elements of a loop: computed before it, under this name."""

    name: str


@dataclass
class Text:
    """Lines of C, indented."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1
    count: int = 0

    def fresh(self, prefix: str) -> str:
        """A name that nothing else here has."""
        self.count += 1
        return f"{prefix}{self.count}"

    def add(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def begin(self, line: str) -> None:
        self.add(line + " {")
        self.depth += 1

    def end(self) -> None:
        self.depth -= 1
        self.add("}")


@dataclass(frozen=True)
class Lanes:
    """The elements that a line of C computes: `count` of V, along the innermost index, or one (0)."""

    count: int
    whole: int

    @property
    def is_vector(self) -> bool:
        return self.count > 0


class Scope:
    """Expressions printed as constants of C, each once, in a block where indices have these names."""

    def __init__(self, text: Text, indices: Sequence[str], lanes: Lanes, prefix: str = "x") -> None:
        self.text, self.indices, self.lanes, self._prefix = text, list(indices), lanes, prefix
        self._names: dict[str, str] = {}
        self._done: dict[int, tuple[Expr, str]] = {}  # with the expression: an id is good while it lives

    def value(self, expr: Expr, accumulated: str = "") -> str:
        """The name or text of an element's value."""
        if id(expr) not in self._done:
            self._done[id(expr)] = (expr, self._printed(expr, accumulated))
        return self._done[id(expr)][1]

    def named(self, type: str, text: str) -> str:
        if text not in self._names:
            name = self.text.fresh(self._prefix)
            self.text.add(f"const {type} {name} = {text};")
            self._names[text] = name
        return self._names[text]

    def _type(self, type: Type) -> str:
        if self.lanes.is_vector:
            return f"v{type}"
        return "int" if type == "u1" else type

    def _printed(self, expr: Expr, accumulated: str) -> str:
        if isinstance(expr, Acc):
            return accumulated
        if isinstance(expr, Once):
            return (
                self.named(f"v{expr.type}", f"bc_{expr.type}({expr.name})")
                if self.lanes.is_vector
                else expr.name
            )
        if isinstance(expr, Const):
            return self._constant(expr)
        if isinstance(expr, Load | Gather):
            return self.named(self._type(expr.type), self._loaded(expr))
        if isinstance(expr, Iota):
            return self._counted(expr)
        assert isinstance(expr, Op), expr
        args = [self.value(arg, accumulated) for arg in expr.args]
        return self.named(self._type(expr.type), self._computed(expr, args))

    def _constant(self, expr: Const) -> str:
        text = literal(expr)
        return self.named(f"v{expr.type}", f"bc_{expr.type}({text})") if self.lanes.is_vector else text

    def _counted(self, expr: Iota) -> str:
        start = affine(expr.offset, expr.strides, self.indices)
        if not self.lanes.is_vector:
            return f"({start})"
        step = expr.strides[-1] if expr.strides else 0
        lanes = ", ".join(str(step * lane) for lane in range(self.lanes.whole))
        return self.named("vi8", f"(vi8){{{lanes}}} + (i8)({start})")

    def _loaded(self, expr: Load | Gather) -> str:
        place, type = expr.place, expr.type
        where = at(place, self.indices)
        for one in expr.along if isinstance(expr, Gather) else ():
            where += f" + {one.stride} * {self.index(one)}"
        if not self.lanes.is_vector:
            return f"*({where})"
        stride = place.strides[-1] if place.strides else 0
        if stride == 1:
            return f"ld_{type}({where})"
        if stride == 0:
            return f"bc_{type}(*({where}))"
        return f"lds_{type}({where}, {stride}, {self.lanes.count})"

    def index(self, along: Along) -> str:
        """A computed place, as one number for all lanes."""
        single = Scope(self.text, self.indices, Lanes(0, self.lanes.whole)) if self.lanes.is_vector else self
        return f"at({single.value(along.index)}, {along.bound}, bad)"

    def _computed(self, expr: Op, args: list[str]) -> str:
        name, own = expr.name, expr.args[0].type
        vector = self.lanes.is_vector
        if name == "cast":
            return self._cast(args[0], own, expr.type)
        if name == "where" and isinstance(expr.args[0], Once):
            return f"{expr.args[0].name} ? {args[1]} : {args[2]}"
        if name == "where":
            return f"sel_v{expr.type}({', '.join(args)})" if vector else f"{args[0]} ? {args[1]} : {args[2]}"
        if name == "not":
            return f"~{args[0]}" if vector else f"!{args[0]}"
        if name == "neg":
            return f"-{args[0]}"
        if name == "isnan":
            return f"AS({args[0]} != {args[0]}, vu1)" if vector else f"{args[0]} != {args[0]}"
        if name == "isinf":
            big = f"abs_{'v' if vector else ''}{own}({args[0]}) == INFINITY"
            return f"AS({big}, vu1)" if vector else big
        if name in COMPARED and own == "u1" and vector:
            return f"AS({args[0]} {_INFIX[name]} {args[1]}, vu1)"
        if name in ("eq", "ne") and own == "i8" and vector:
            return f"{'~' if name == 'ne' else ''}eq_vi8({args[0]}, {args[1]})"
        if name in _INFIX and not (name == "div" and own in ("i8", "i4")):
            text = f"{args[0]} {_INFIX[name]} {args[1]}"
            return f"AS({text}, vu1)" if name in COMPARED and vector else text
        return f"{name}_{'v' if vector else ''}{expr.type}({', '.join(args)})"

    def _cast(self, arg: str, old: Type, new: Type) -> str:
        if self.lanes.is_vector:
            if new == "u1":
                return f"AS({arg} != 0, vu1)"
            return f"AS(-{arg}, v{new})" if old == "u1" else f"AS({arg}, v{new})"
        return f"{arg} != 0" if new == "u1" else f"({new}){arg}"

    def store(self, outs: Sequence[Out], accumulated: str = "") -> None:
        """All are computed before the first is stored: they may read what others store."""
        values = [self.value(out.value, accumulated) for out in outs]
        for out, value in zip(outs, values, strict=True):
            self._store(out.place, value)

    def _store(self, place: Place, value: str) -> None:
        where, type = at(place, self.indices), place.array.type
        count = self.lanes.count
        if not self.lanes.is_vector:
            self.text.add(f"*({where}) = {value};")
            return
        stride = place.strides[-1] if place.strides else 0
        if stride != 1:
            self.text.add(f"sts_{type}({where}, {stride}, {value}, {count});")
        elif count == self.lanes.whole:
            self.text.add(f"st_{type}({where}, {value});")
        else:
            self.text.add(f"stp_{type}({where}, {value}, {count});")


def affine(offset: int, strides: Shape, indices: Sequence[str]) -> str:
    """The text of an affine function of the indices."""
    parts = [
        index if stride == 1 else f"{stride} * {index}"
        for stride, index in zip(strides, indices, strict=True)
        if stride and index != "0"
    ]
    return " + ".join([*parts, str(offset)] if offset or not parts else parts)


def at(place: Place, indices: Sequence[str]) -> str:
    where = affine(place.offset, place.strides, indices)
    return f"P_{place.array.name} + {where}" if where != "0" else f"P_{place.array.name}"


def literal(expr: Const) -> str:
    value = expr.value
    if expr.type in ("f4", "f8"):
        number = float(value)
        if number != number:
            return "NAN"
        if number in (float("inf"), float("-inf")):
            return "INFINITY" if number > 0 else "(-INFINITY)"
        text = number.hex() + ("f" if expr.type == "f4" else "")
        return f"({text})" if number < 0 else text
    if expr.type == "u1":
        return "1" if value else "0"
    return f"{int(value)}" if abs(int(value)) < 1 << 31 else f"INT64_C({int(value)})"
