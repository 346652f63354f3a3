"""Loops printed as C: a function for each statement, over one piece of memory in which all arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from carpool.kernels.resident.loops import (
    SIZES,
    Acc,
    Along,
    Array,
    Const,
    Draw,
    Expr,
    Gather,
    Iota,
    Load,
    Map,
    Op,
    Out,
    Place,
    Product,
    Reduce,
    Scan,
    Scatter,
    Shape,
    Statement,
    Type,
    collapsed,
    moved,
    nodes,
    strides_in,
)

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_IDENTITY = {"sum": "0", "prod": "1", "max": "-INFINITY", "min": "INFINITY"}
_COMBINED = {"sum": "{0} + {1}", "prod": "{0} * {1}", "max": "max_{t}({0}, {1})", "min": "min_{t}({0}, {1})"}
_ROWS, _VECTORS = (
    4,
    2,
)  # of a product that are in registers: 8 sums, 2 of the right, 1 of the left of 16 there are


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
    """The elements that a line of C computes: `count` of V, along the innermost index, or a single one (0)."""

    count: int
    whole: int

    @property
    def is_vector(self) -> bool:
        return self.count > 0


class Scope:
    """Expressions printed as constants of C, each once, in a block where the loops' indices have these names."""

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
            where += f" + {one.stride} * {self._index(one)}"
        if not self.lanes.is_vector:
            return f"*({where})"
        stride = place.strides[-1] if place.strides else 0
        if stride == 1:
            return f"ld_{type}({where})"
        if stride == 0:
            return f"bc_{type}(*({where}))"
        return f"lds_{type}({where}, {stride}, {self.lanes.count})"

    def _index(self, along: Along) -> str:
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
        if name in _COMPARED and own == "u1" and vector:
            return f"AS({args[0]} {_INFIX[name]} {args[1]}, vu1)"
        if name in _INFIX and not (name == "div" and own in ("i8", "i4")):
            text = f"{args[0]} {_INFIX[name]} {args[1]}"
            return f"AS({text}, vu1)" if name in _COMPARED and vector else text
        return f"{name}_{'v' if vector else ''}{expr.type}({', '.join(args)})"

    def _cast(self, arg: str, old: Type, new: Type) -> str:
        if self.lanes.is_vector:
            if new == "u1":
                return f"AS({arg} != 0, vu1)"
            return f"AS(-{arg}, v{new})" if old == "u1" else f"AS({arg}, v{new})"
        return f"{arg} != 0" if new == "u1" else f"({new}){arg}"

    def store(self, out: Out, accumulated: str = "") -> None:
        value, place = self.value(out.value, accumulated), out.place
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


@dataclass(frozen=True, eq=False)
class Once(Expr):
    """What is the same for all elements of a loop: computed before it, under this name."""

    name: str


class _Hoist:
    """Takes what is the same for all elements out of a statement's expressions."""

    def __init__(self) -> None:
        self._fixed: dict[int, tuple[Expr, bool]] = {}
        self._known: dict[str, Once] = {}
        self.found: list[tuple[Once, Expr]] = []

    def outs(self, outs: Sequence[Out], inner: Sequence[Expr] = ()) -> tuple[tuple[Out, ...], list[Expr]]:
        memo: dict[int, Expr] = {}
        return (
            tuple(Out(out.place, self.taken(out.value, memo)) for out in outs),
            [self.taken(expr, memo) for expr in inner],
        )

    def taken(self, expr: Expr, memo: dict[int, Expr]) -> Expr:
        """The expression without what is fixed in it. A division by what is fixed is a product with its inverse."""
        if id(expr) not in memo:
            memo[id(expr)] = self._taken(expr, memo)
        return memo[id(expr)]

    def _taken(self, expr: Expr, memo: dict[int, Expr]) -> Expr:
        if self._is_fixed(expr):
            return expr if isinstance(expr, Const) else self._once(expr)
        if isinstance(expr, Gather):
            return expr
        if not isinstance(expr, Op):
            return expr
        left = [self.taken(arg, memo) for arg in expr.args]
        divides = expr.name == "div" and expr.type in ("f4", "f8") and self._is_fixed(expr.args[1])
        if divides:
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
        outs, _ = hoist.outs(statement.outs)
        return replace(statement, outs=outs), hoist.found
    if isinstance(statement, Reduce):
        outs, [value] = hoist.outs(statement.outs, [statement.value])
        return replace(statement, outs=outs, value=value), hoist.found
    return statement, []


class Printer:
    """Prints statements for weights of one type."""

    def __init__(self, real: Type) -> None:
        self.real = real
        self.lanes = 32 // SIZES[real]

    def function(self, name: str, statement: Statement) -> str:
        """A statement as a function of C."""
        text = Text()
        if prod(getattr(statement, "space", ())) > 1:
            statement, found = hoisted(statement)
            scope = Scope(text, [], Lanes(0, self.lanes), "fixed")
            for once, expr in found:
                bare = moved(expr, lambda offset, _: (offset, ()))
                kind = "int" if once.type == "u1" else once.type
                text.add(f"const {kind} {once.name} = {scope.value(bare)};")
        print_ = {
            Map: self._map, Reduce: self._reduce, Product: self._product, Scatter: self._scatter, Scan: self._scan, Draw: self._draw,
        }[type(statement)]  # fmt: skip
        print_(text, statement)
        body = "\n".join(text.lines)
        return f"static APART void {name}(char *restrict A, int *restrict bad) {{\n{body}\n}}\n"

    # Maps

    def _map(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Map)
        space, outs = _simplest(statement.space, statement.outs)
        if not space or not self._fits_lanes([out.value for out in outs]):
            self._loops(text, space, lambda names: self._single(text, names, outs))
            return
        if len(space) == 1 and all(_covers(out, space[0]) for out in outs):
            space = (-(-space[0] // self.lanes) * self.lanes,)  # into what is left free behind each array

        def inner(names: list[str]) -> None:
            self._by_lanes(text, names, space[-1], lambda scope: [scope.store(out) for out in outs])

        self._loops(text, space[:-1], inner)

    def _single(self, text: Text, names: list[str], outs: Sequence[Out]) -> None:
        scope = Scope(text, names, Lanes(0, self.lanes))
        for out in outs:
            scope.store(out)

    def _fits_lanes(self, values: Sequence[Expr]) -> bool:
        """Whether all loads go on from a place that is computed once for all lanes."""
        for expr in nodes(*values):
            if isinstance(expr, Gather) and any(
                strides[-1:] not in ((), (0,)) for one in expr.along for strides in strides_in(one.index)
            ):
                return False
        return True

    def _loops(self, text: Text, space: Shape, body: Callable[[list[str]], None]) -> None:
        names = [f"i{dim}" for dim in range(len(space))]
        for name, size in zip(names, space, strict=True):
            text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")
        body(names)
        for _ in names:
            text.end()

    def _by_lanes(self, text: Text, names: list[str], size: int, body: Callable[[Scope], object]) -> None:
        """Vector after vector along the innermost index, then what is left."""
        whole, rest = size - size % self.lanes, size % self.lanes
        if whole:
            text.begin(f"for (i8 j = 0; j < {whole}; j += V)")
            body(Scope(text, [*names, "j"], Lanes(self.lanes, self.lanes)))
            text.end()
        if rest:
            text.begin("")
            if whole:
                text.add(f"const i8 j = {whole};")
            body(Scope(text, [*names, "j" if whole else "0"], Lanes(rest, self.lanes)))
            text.end()

    # Reductions

    def _reduce(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Reduce)
        kept, over, value, outs = _split(statement)
        exprs = [value]
        if (
            statement.kind.startswith("arg")
            or value.type not in (self.real, "f4", "f8")
            or not self._fits_lanes(exprs)
        ):
            self._one_by_one(text, statement, kept, over, value, outs)
        elif kept and _unit(exprs, len(kept) - 1) > (_unit(exprs, -1) if over else 0):
            self._by_columns(text, statement.kind, kept, over, value, outs)
        elif over and over[-1] > 1:
            self._along(text, statement.kind, kept, over, value, outs)
        else:
            self._one_by_one(text, statement, kept, over, value, outs)

    def _one_by_one(
        self, text: Text, statement: Reduce, kept: Shape, over: Shape, value: Expr, outs: Sequence[Out]
    ) -> None:
        """Element after element, in single numbers."""
        kind, type = statement.kind, value.type
        kind_of = "int" if type == "u1" else type

        def body(names: list[str]) -> None:
            inner = [f"r{dim}" for dim in range(len(over))]
            if kind.startswith("arg"):
                text.add(f"{kind_of} best = 0; i8 acc = -1, n = 0;")
            else:
                text.add(f"{kind_of} acc = {_identity(kind, type)};")
            for name, size in zip(inner, over, strict=True):
                text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")
            scope = Scope(text, [*names, *inner], Lanes(0, self.lanes))
            found = scope.value(value)
            if kind.startswith("arg"):
                sign = ">" if kind == "argmax" else "<"
                text.add(f"if (acc < 0 || {found} {sign} best || ({found} != {found} && best == best))")
                text.add(f"    best = {found}, acc = n;")
                text.add("++n;")
            else:
                text.add(f"acc = {_COMBINED[kind].format('acc', found, t=type)};")
            for _ in inner:
                text.end()
            scope = Scope(text, names, Lanes(0, self.lanes))
            for out in outs:
                scope.store(out, "acc")

        self._loops(text, kept, body)

    def _by_columns(
        self, text: Text, kind: str, kept: Shape, over: Shape, value: Expr, outs: Sequence[Out]
    ) -> None:
        """A vector of results at a time, each its own sum."""
        type = value.type

        def inner(names: list[str]) -> None:
            def columns(scope: Scope) -> None:
                text.add(f"v{type} acc = bc_{type}({_identity(kind, type)});")
                loops = [f"r{dim}" for dim in range(len(over))]
                for name, size in zip(loops, over, strict=True):
                    text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")
                own = Scope(text, [*scope.indices[:-1], *loops, scope.indices[-1]], scope.lanes)
                found = own.value(moved(value, _last_kept_last(len(kept), len(over))))
                text.add(f"acc = {_COMBINED[kind].format('acc', found, t='v' + type)};")
                for _ in loops:
                    text.end()
                for out in outs:
                    scope.store(out, "acc")

            self._by_lanes(text, names, kept[-1], columns)

        self._loops(text, kept[:-1], inner)

    def _along(
        self, text: Text, kind: str, kept: Shape, over: Shape, value: Expr, outs: Sequence[Out]
    ) -> None:
        """Lanes of one result, put together at the end."""
        type = value.type

        def body(names: list[str]) -> None:
            identity = _identity(kind, type)
            text.add(f"v{type} sums = bc_{type}({identity});")
            loops = [f"r{dim}" for dim in range(len(over) - 1)]
            for name, size in zip(loops, over[:-1], strict=True):
                text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")

            def lanes(scope: Scope) -> None:
                found = scope.value(value)
                if scope.lanes.count < self.lanes:
                    found = f"sel_v{type}(below({scope.lanes.count}), {found}, bc_{type}({identity}))"
                text.add(f"sums = {_COMBINED[kind].format('sums', found, t='v' + type)};")

            self._by_lanes(text, [*names, *loops], over[-1], lanes)
            for _ in loops:
                text.end()
            text.add(f"const {type} acc = h{kind}_{type}(sums);")
            scope = Scope(text, names, Lanes(0, self.lanes))
            for out in outs:
                scope.store(out, "acc")

        self._loops(text, kept, body)

    # Products

    def _product(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Product)
        batch = [f"i{dim}" for dim in range(len(statement.batch))]
        for name, size in zip(batch, statement.batch, strict=True):
            text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")
        block = _VECTORS * self.lanes
        whole = statement.columns - statement.columns % block
        if whole:
            text.begin(f"for (i8 j = 0; j < {whole}; j += {block})")
            self._rows(text, statement, batch, "j", [self.lanes] * _VECTORS)
            text.end()
        if rest := statement.columns - whole:
            text.begin("")
            text.add(f"const i8 j = {whole};")
            counts = [min(self.lanes, rest - start) for start in range(0, rest, self.lanes)]
            self._rows(text, statement, batch, "j", counts)
            text.end()
        for _ in batch:
            text.end()

    def _rows(self, text: Text, product: Product, batch: list[str], column: str, counts: list[int]) -> None:
        whole, rest = product.rows - product.rows % _ROWS, product.rows % _ROWS
        if whole:
            text.begin(f"for (i8 i = 0; i < {whole}; i += {_ROWS})")
            self._block(text, product, batch, column, counts, _ROWS)
            text.end()
        if rest:
            text.begin("")
            text.add(f"const i8 i = {whole};")
            self._block(text, product, batch, column, counts, rest)
            text.end()

    def _block(
        self, text: Text, product: Product, batch: list[str], column: str, counts: list[int], rows: int
    ) -> None:
        """So many rows of so many vectors, in registers through all the depth."""
        t, vectors = (
            self.real if product.left.array.type == self.real else product.left.array.type,
            len(counts),
        )
        left, right = product.left, product.right
        zeros = ", ".join(["{" + ", ".join(["{}"] * vectors) + "}"] * rows)
        text.add(f"v{t} sums[{rows}][{vectors}] = {{{zeros}}};")
        text.add(f"const {t} *a = {at(left, [*batch, 'i', '0'])}, *b = {at(right, [*batch, '0', column])};")
        text.begin(f"for (i8 k = 0; k < {product.depth}; ++k)")
        for v in range(vectors):
            text.add(f"const v{t} b{v} = ld_{t}(b + {right.strides[-2]} * k + {v} * V);")
        for r in range(rows):
            text.add(f"const v{t} a{r} = bc_{t}(a[{left.strides[-2]} * {r} + {left.strides[-1]} * k]);")
            for v in range(vectors):
                text.add(f"sums[{r}][{v}] += a{r} * b{v};")
        text.end()
        for v, count in enumerate(counts):
            if rows > 1:
                text.lines.append(f"#pragma GCC unroll {rows}")
                text.begin(f"for (int r = 0; r < {rows}; ++r)")
            else:
                text.begin("")
                text.add("const int r = 0;")
            text.add("const i8 row = i + r;")
            text.add(f"const i8 at_ = {column} + {v} * V;")
            text.add(f"const v{t} acc = sums[r][{v}];")
            scope = Scope(text, [*batch, "row", "at_"], Lanes(count, self.lanes))
            for out in product.outs:
                scope.store(out, "acc")
            text.end()

    # The rest

    def _scatter(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Scatter)
        gather = Gather(statement.value.type, statement.place, statement.along)
        total = statement.value
        if statement.adds:
            total = Op(statement.value.type, "add", (gather, total))
        space = statement.space
        if space and space[-1] > 1 and statement.place.strides[-1] == 1 and self._fits_lanes([total]):

            def inner(names: list[str]) -> None:
                self._by_lanes(text, names, space[-1], lambda scope: self._added(scope, statement, total))

            self._loops(text, space[:-1], inner)
            return
        self._loops(
            text,
            space,
            lambda names: self._added(Scope(text, names, Lanes(0, self.lanes)), statement, total),
        )

    def _added(self, scope: Scope, statement: Scatter, total: Expr) -> None:
        where = at(statement.place, scope.indices)
        for one in statement.along:
            where += f" + {one.stride} * {scope._index(one)}"
        type = statement.place.array.type
        value = scope.value(total)
        if not scope.lanes.is_vector:
            scope.text.add(f"*({where}) = {value};")
        elif scope.lanes.count == scope.lanes.whole:
            scope.text.add(f"st_{type}({where}, {value});")
        else:
            scope.text.add(f"stp_{type}({where}, {value}, {scope.lanes.count});")

    def _scan(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Scan)
        *outer, size = statement.space
        type = statement.value.type

        def body(names: list[str]) -> None:
            text.add(f"{type} acc = {_identity(statement.kind, type)};")
            text.begin(f"for (i8 r = 0; r < {size}; ++r)")
            scope = Scope(text, [*names, "r"], Lanes(0, self.lanes))
            text.add(
                f"acc = {_COMBINED[statement.kind].format('acc', scope.value(statement.value), t=type)};"
            )
            scope.store(Out(statement.place, Acc(type)), "acc")
            text.end()

        self._loops(text, tuple(outer), body)

    def _draw(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Draw)
        scope = Scope(text, [], Lanes(0, self.lanes))
        seed, step = scope.value(statement.seed), scope.value(statement.step)
        text.add(
            f"draw(P_{statement.array.name}, {statement.count}, (uint64_t){seed}, (uint64_t){step}, {statement.call});"
        )


def _identity(kind: str, type: Type) -> str:
    if kind in ("max", "min") and type not in ("f4", "f8"):
        bits = "32" if type == "i4" else "64"
        return f"INT{bits}_{'MIN' if kind == 'max' else 'MAX'}"
    return _IDENTITY[kind]


def _unit(values: Sequence[Expr], dim: int) -> int:
    return sum(strides[dim] == 1 for strides in strides_in(*values) if strides)


def _covers(out: Out, size: int) -> bool:
    return out.place.offset == 0 and out.place.strides == (1,) and out.place.array.size == size


def _simplest(space: Shape, outs: Sequence[Out]) -> tuple[Shape, list[Out]]:
    """The loops in the order of the first out's memory, as few as possible."""
    first = outs[0].place.strides
    order = sorted(range(len(space)), key=lambda dim: -abs(first[dim]) if space[dim] > 1 else 0)
    return _shaped([space[dim] for dim in order], order, outs)


def _shaped(sizes: Sequence[int], order: Sequence[int], outs: Sequence[Out]) -> tuple[Shape, list[Out]]:
    def turn(offset: int, strides: Shape) -> tuple[int, Shape]:
        return offset, tuple(strides[dim] for dim in order)

    turned = [_moved_out(out, turn) for out in outs]
    all_strides = strides_in(*(out.value for out in turned)) + [out.place.strides for out in turned]
    space, strides = collapsed(tuple(sizes), all_strides)
    known = dict(zip(all_strides, strides, strict=True))
    return space, [_moved_out(out, lambda offset, old: (offset, known[old])) for out in turned]


def _moved_out(out: Out, move: Callable[[int, Shape], tuple[int, Shape]]) -> Out:
    offset, strides = move(out.place.offset, out.place.strides)
    return Out(replace(out.place, offset=offset, strides=strides), moved(out.value, move))


def _split(statement: Reduce) -> tuple[Shape, Shape, Expr, list[Out]]:
    """Kept and reduced dimensions, each as few as possible, and everything in them."""
    kept, over = statement.space[: statement.kept], statement.space[statement.kept :]
    inner = strides_in(statement.value)
    outer = strides_in(*(out.value for out in statement.outs)) + [out.place.strides for out in statement.outs]
    kept_sizes, kept_strides = collapsed(kept, [s[: statement.kept] for s in inner] + outer)
    over_sizes, over_strides = collapsed(over, [s[statement.kept :] for s in inner])
    both = {old: (*a, *b) for old, a, b in zip(inner, kept_strides[: len(inner)], over_strides, strict=True)}
    alone = dict(zip(outer, kept_strides[len(inner) :], strict=True))
    value = moved(statement.value, lambda offset, old: (offset, both[old]))
    outs = [_moved_out(out, lambda offset, old: (offset, alone[old])) for out in statement.outs]
    return kept_sizes, over_sizes, value, outs


def _last_kept_last(kept: int, over: int) -> Callable[[int, Shape], tuple[int, Shape]]:
    def move(offset: int, strides: Shape) -> tuple[int, Shape]:
        return offset, (*strides[: kept - 1], *strides[kept : kept + over], strides[kept - 1])

    return move


def memory(arrays: Sequence[Array]) -> tuple[Mapping[str, int], int]:
    """Where each array begins, in bytes, and how many all of them take: behind each there is room for a vector."""
    places: dict[str, int] = {}
    end = 0
    for array in arrays:
        places[array.name] = end
        end += -(-(array.size * SIZES[array.type]) // 64) * 64 + 64
    return places, end
