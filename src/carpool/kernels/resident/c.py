"""Loops printed as C: a function for each statement, over one piece of memory in which all arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from carpool.kernels.resident.blocks import SUMS, Blocks
from carpool.kernels.resident.elements import Lanes, Scope, Text, at
from carpool.kernels.resident.hoist import hoisted
from carpool.kernels.resident.loops import (
    LARGEST,
    SIZES,
    Acc,
    Array,
    Draw,
    Expr,
    Gather,
    Map,
    Op,
    Out,
    Product,
    Reduce,
    Scan,
    Scatter,
    Shape,
    Statement,
    Type,
    moved,
)
from carpool.kernels.resident.spaces import covers, fits_lanes, last_kept_last, simplest, split, unit

_IDENTITY = {"sum": "0", "prod": "1", "max": "-INFINITY", "min": "INFINITY"}
_PART = 128  # terms of a sum that follow one another
_COMBINED = {"sum": "{0} + {1}", "prod": "{0} * {1}", "max": "max_{t}({0}, {1})", "min": "min_{t}({0}, {1})"}


class Printer:
    """Prints statements for weights of one type, in vectors of so many bytes."""

    def __init__(self, real: Type, vector_bytes: int) -> None:
        self.real, self.lanes, self.sums = real, vector_bytes // SIZES[real], SUMS[vector_bytes]

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
            Map: self._map, Reduce: self._reduce, Product: self._product,
            Scatter: self._scatter, Scan: self._scan, Draw: self._draw,
        }[type(statement)]  # fmt: skip
        print_(text, statement)
        body = "\n".join(text.lines)
        return f"static APART void {name}(char *restrict A, int *restrict bad) {{\n{body}\n}}\n"

    # Maps

    def _map(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Map)
        space, outs = simplest(statement.space, statement.outs)
        if not space or not fits_lanes([out.value for out in outs]):
            self._loops(text, space, lambda names: self._single(text, names, outs))
            return
        if len(space) == 1 and covers(outs, space[0]):
            space = (-(-space[0] // self.lanes) * self.lanes,)  # into what is left free behind each array

        def inner(names: list[str]) -> None:
            self._by_lanes(text, names, space[-1], lambda scope: scope.store(outs))

        self._loops(text, space[:-1], inner)

    def _single(self, text: Text, names: list[str], outs: Sequence[Out]) -> None:
        scope = Scope(text, names, Lanes(0, self.lanes))
        scope.store(outs)

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
        kept, over, value, outs = split(statement)
        exprs = [value]
        if statement.kind.startswith("arg"):
            self._place(text, statement, kept, over, value, outs)
        elif value.type not in (self.real, "f4", "f8") or not fits_lanes(exprs):
            self._one_by_one(text, statement, kept, over, value, outs)
        elif kept and self._in_columns(exprs, kept, over) and fits_lanes([out.value for out in outs]):
            self._by_columns(text, statement.kind, kept, over, value, outs)
        elif over and over[-1] > 1:
            self._along(text, statement.kind, kept, over, value, outs)
        else:
            self._one_by_one(text, statement, kept, over, value, outs)

    def _in_columns(self, values: Sequence[Expr], kept: Shape, over: Shape) -> bool:
        """Whether lanes are results: where those lie side by side, or where each is of a few elements only."""
        few = bool(over) and over[-1] <= self.lanes // 2 <= kept[-1]
        return few or unit(values, len(kept) - 1) > (unit(values, -1) if over else 0)

    def _one_by_one(
        self, text: Text, statement: Reduce, kept: Shape, over: Shape, value: Expr, outs: Sequence[Out]
    ) -> None:
        """Element after element, in single numbers."""
        inner = [f"r{dim}" for dim in range(len(over))]

        def body(names: list[str]) -> None:
            sums = _Accumulator(text, statement.kind, value.type, "acc", prod(over))
            sums.begin()
            for name, size in zip(inner, over, strict=True):
                text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")
            sums.take(Scope(text, [*names, *inner], Lanes(0, self.lanes)).value(value))
            for _ in inner:
                text.end()
            sums.finish()
            Scope(text, names, Lanes(0, self.lanes)).store(outs, "acc")

        self._loops(text, kept, body)

    def _place(
        self, text: Text, statement: Reduce, kept: Shape, over: Shape, value: Expr, outs: Sequence[Out]
    ) -> None:
        """The number of the first element that is the largest or the smallest; NaN is both."""
        inner = [f"r{dim}" for dim in range(len(over))]
        type, sign = "int" if value.type == "u1" else value.type, ">" if statement.kind == "argmax" else "<"

        def body(names: list[str]) -> None:
            text.add(f"{type} best = 0;")
            text.add("i8 acc = -1, n = 0;")
            for name, size in zip(inner, over, strict=True):
                text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")
            found = Scope(text, [*names, *inner], Lanes(0, self.lanes)).value(value)
            # No branches: nobody can guess which is the best.
            is_nan = f"(({found} != {found}) & (best == best))"
            text.add(f"const int is_better = (acc < 0) | ({found} {sign} best) | {is_nan};")
            text.add(f"best = is_better ? {found} : best, acc = is_better ? n : acc;")
            text.add("++n;")
            for _ in inner:
                text.end()
            Scope(text, names, Lanes(0, self.lanes)).store(outs, "acc")

        self._loops(text, kept, body)

    def _by_columns(
        self, text: Text, kind: str, kept: Shape, over: Shape, value: Expr, outs: Sequence[Out]
    ) -> None:
        """A vector of results at a time, each its own sum."""
        type = value.type

        def inner(names: list[str]) -> None:
            def columns(scope: Scope) -> None:
                sums = _Accumulator(text, kind, type, "acc", prod(over), is_vector=True)
                sums.begin()
                loops = [f"r{dim}" for dim in range(len(over))]
                for name, size in zip(loops, over, strict=True):
                    text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")
                own = Scope(text, [*scope.indices[:-1], *loops, scope.indices[-1]], scope.lanes)
                found = own.value(moved(value, last_kept_last(len(kept), len(over))))
                sums.take(found)
                for _ in loops:
                    text.end()
                sums.finish()
                scope.store(outs, "acc")

            self._by_lanes(text, names, kept[-1], columns)

        self._loops(text, kept[:-1], inner)

    def _along(
        self, text: Text, kind: str, kept: Shape, over: Shape, value: Expr, outs: Sequence[Out]
    ) -> None:
        """Lanes of one result, put together at the end."""
        type = value.type

        def result(names: list[str]) -> str:
            count = prod(over) // self.lanes
            sums = _Accumulator(text, kind, type, "sums", count, is_vector=True)
            sums.begin()
            loops = [f"r{dim}" for dim in range(len(over) - 1)]
            for name, size in zip(loops, over[:-1], strict=True):
                text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")

            def lanes(scope: Scope) -> None:
                found = scope.value(value)
                if scope.lanes.count < self.lanes:
                    found = f"sel_v{type}(below({scope.lanes.count}), {found}, {sums.identity})"
                sums.take(found)

            self._by_lanes(text, [*names, *loops], over[-1], lanes)
            for _ in loops:
                text.end()
            sums.finish()
            return f"h{kind}_{type}(sums)"

        self._results(text, type, kept, outs, result)

    def _results(
        self, text: Text, type: Type, kept: Shape, outs: Sequence[Out], result: Callable[[list[str]], str]
    ) -> None:
        """One result after another; what is computed of them is computed of a vector of them."""

        def single(names: list[str]) -> None:
            text.add(f"const {type} acc = {result(names)};")
            Scope(text, names, Lanes(0, self.lanes)).store(outs, "acc")

        def several(scope: Scope) -> None:
            text.add(f"{type} found[V] = {{0}};")
            text.begin(f"for (i8 lane = 0; lane < {scope.lanes.count}; ++lane)")
            text.add(f"const i8 own = {scope.indices[-1]} + lane;")
            text.add(f"found[lane] = {result([*scope.indices[:-1], 'own'])};")
            text.end()
            text.add(f"const v{type} acc = ld_{type}(found);")
            scope.store(outs, "acc")

        values = [out.value for out in outs]
        if kept and kept[-1] > 1 and fits_lanes(values) and not all(isinstance(one, Acc) for one in values):
            self._loops(text, kept[:-1], lambda names: self._by_lanes(text, names, kept[-1], several))
        else:
            self._loops(text, kept, single)

    # The rest

    def _product(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Product)
        Blocks(text, statement, self.lanes, self.sums).print()

    def _scatter(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Scatter)
        gather = Gather(statement.value.type, statement.place, statement.along)
        total = statement.value
        if statement.adds:
            total = Op(statement.value.type, "add", (gather, total))
        space = statement.space
        if space and space[-1] > 1 and statement.place.strides[-1] == 1 and fits_lanes([total]):

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
            where += f" + {one.stride} * {scope.index(one)}"
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
            scope.store([Out(statement.place, Acc(type))], "acc")
            text.end()

        self._loops(text, tuple(outer), body)

    def _draw(self, text: Text, statement: Statement) -> None:
        assert isinstance(statement, Draw)
        scope = Scope(text, [], Lanes(0, self.lanes))
        seed, step = scope.value(statement.seed), scope.value(statement.step)
        text.add(f"const uint64_t seed = {seed}, step = {step};")
        text.add(f"draw(P_{statement.array.name}, {statement.count}, seed, step, {statement.call});")


class _Accumulator:
    """What a reduction has so far. Long sums are added up in parts, as errors grow with how many follow one another."""

    def __init__(
        self, text: Text, kind: str, type: Type, name: str, count: int, is_vector: bool = False
    ) -> None:
        self._text, self._kind, self._name = text, kind, name
        self._type = f"v{type}" if is_vector else "int" if type == "u1" else type
        self._suffix = f"v{type}" if is_vector else type
        self.identity = _identity(kind, type)
        if is_vector:
            self.identity = f"bc_{type}({self.identity})"
        self._is_long = kind == "sum" and count > 2 * _PART and type in ("f4", "f8")

    def begin(self) -> None:
        self._text.add(f"{self._type} {self._name} = {self.identity};")
        if self._is_long:
            self._text.add(f"{self._type} total = {self.identity};")
            self._text.add("i8 terms = 0;")

    def take(self, found: str) -> None:
        name = self._name
        self._text.add(f"{name} = {_COMBINED[self._kind].format(name, found, t=self._suffix)};")
        if self._is_long:
            self._text.add(f"if (++terms % {_PART} == 0) total = total + {name}, {name} = {self.identity};")

    def finish(self) -> None:
        if self._is_long:
            self._text.add(f"{self._name} = total + {self._name};")


def _identity(kind: str, type: Type) -> str:
    if kind in ("max", "min") and type not in ("f4", "f8"):
        bits = "32" if type == "i4" else "64"
        return f"INT{bits}_{'MIN' if kind == 'max' else 'MAX'}"
    return _IDENTITY[kind]


def memory(arrays: Sequence[Array], lanes: int) -> tuple[Mapping[str, int], int]:
    """Where each array begins, in bytes, and what all take: behind each is room for any vector."""
    places: dict[str, int] = {}
    end = 0
    for array in arrays:
        places[array.name] = end
        end += -(-(array.size * SIZES[array.type]) // 64) * 64 + lanes * LARGEST
    return places, end
