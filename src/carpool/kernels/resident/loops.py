"""What a step of one member computes: loops over named arrays, free of any framework and target language.

An element of a loop is an expression over loads. Loads are affine in the loop's indices, so views of an
array (slices, transposes, broadcasts) cost nothing: they are other strides. What is not affine, an
embedding's row say, is a `Gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Literal

Type = Literal["f4", "f8", "i8", "i4", "u1"]
"""Of an element: floating point, integer, or truth, by its bytes."""
SIZES: dict[Type, int] = {"f4": 4, "f8": 8, "i8": 8, "i4": 4, "u1": 1}
LARGEST = max(SIZES.values())
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Array:
    """A named piece of a member's memory. `kept` ones live from step to step, the others within one."""

    name: str
    type: Type
    shape: Shape
    kept: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Place:
    """Where in an array each element of a loop lies: an affine function of the loop's indices."""

    array: Array
    offset: int
    strides: Shape


@dataclass(frozen=True, eq=False)
class Expr:
    """The value of one element of a loop."""

    type: Type


@dataclass(frozen=True, eq=False)
class Const(Expr):
    value: float | int | bool


@dataclass(frozen=True, eq=False)
class Load(Expr):
    place: Place


@dataclass(frozen=True, eq=False)
class Iota(Expr):
    """An affine function of the loop's indices, as a number."""

    offset: int
    strides: Shape


@dataclass(frozen=True, eq=False)
class Along:
    """A number that says how far to go along a dimension of an array: `bound` elements, `stride` apart."""

    index: Expr
    stride: int
    bound: int


@dataclass(frozen=True, eq=False)
class Gather(Expr):
    """A load whose place also depends on numbers that are computed. One out of bounds is an error."""

    place: Place
    along: tuple[Along, ...]


@dataclass(frozen=True, eq=False)
class Op(Expr):
    """An operation on elements, by its name in `operations.py`."""

    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Acc(Expr):
    """What a `Reduce` or a `Product` has accumulated for an element."""


@dataclass(frozen=True)
class Out:
    """An element's value, and where it is stored."""

    place: Place
    value: Expr


@dataclass(frozen=True)
class Map:
    """Each element of a space by itself."""

    space: Shape
    outs: tuple[Out, ...]


@dataclass(frozen=True)
class Reduce:
    """Over the last dimensions of a space; `kept` dimensions come first. The outs are over these alone."""

    kind: Literal["sum", "max", "min", "prod", "argmax", "argmin"]
    space: Shape
    kept: int
    value: Expr
    outs: tuple[Out, ...]


@dataclass(frozen=True)
class Product:
    """[batch..., rows, depth] by [batch..., depth, columns]; the outs are over [batch..., rows, columns]."""

    batch: Shape
    rows: int
    columns: int
    depth: int
    left: Place
    right: Place
    outs: tuple[Out, ...]

    @property
    def space(self) -> Shape:
        return (*self.batch, self.rows, self.columns)


@dataclass(frozen=True)
class Scatter:
    """Puts each element of a space to where computed numbers say, one after another; or adds it."""

    space: Shape
    place: Place
    along: tuple[Along, ...]
    value: Expr
    adds: bool = True


@dataclass(frozen=True)
class Scan:
    """Over the last dimension of a space: for each element what has been accumulated as far as it."""

    kind: Literal["sum", "prod"]
    space: Shape
    value: Expr
    place: Place


@dataclass(frozen=True)
class Draw:
    """Random numbers in [0, 1), keyed by (seed, step, call, element)."""

    array: Array
    count: int
    seed: Expr
    step: Expr
    call: int


Statement = Map | Reduce | Product | Scatter | Scan | Draw


def contiguous(shape: Shape) -> Shape:
    """The strides of an array whose elements lie one after another.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def whole(array: Array) -> Place:
    """All of an array, in its own shape."""
    return Place(array, 0, contiguous(array.shape))


def children(expr: Expr) -> tuple[Expr, ...]:
    """The expressions that this one is made of."""
    if isinstance(expr, Op):
        return expr.args
    return tuple(along.index for along in expr.along) if isinstance(expr, Gather) else ()


def nodes(*roots: Expr) -> Iterator[Expr]:
    """Each expression under these, once."""
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        expr = todo.pop()
        if id(expr) not in seen:
            seen.add(id(expr))
            yield expr
            todo += children(expr)


def rebuilt(expr: Expr, leaf: Callable[[Expr], Expr], made: dict[int, Expr] | None = None) -> Expr:
    """The expression with other leaves. What was one expression stays one."""
    made = {} if made is None else made
    if id(expr) not in made:
        if isinstance(expr, Op):
            new: Expr = replace(expr, args=tuple(rebuilt(arg, leaf, made) for arg in expr.args))
        elif isinstance(expr, Gather):
            along = tuple(replace(one, index=rebuilt(one.index, leaf, made)) for one in expr.along)
            new = leaf(replace(expr, along=along))
        else:
            new = leaf(expr)
        made[id(expr)] = new
    return made[id(expr)]


Move = Callable[[int, Shape], tuple[int, Shape]]
"""From offset and strides in one space to those in another."""


def moved(expr: Expr, move: Move, made: dict[int, Expr] | None = None) -> Expr:
    """The expression in another space. `made` is shared by expressions that have parts in common."""

    def leaf(old: Expr) -> Expr:
        if isinstance(old, Load | Gather):
            offset, strides = move(old.place.offset, old.place.strides)
            return replace(old, place=replace(old.place, offset=offset, strides=strides))
        if isinstance(old, Iota):
            offset, strides = move(old.offset, old.strides)
            return replace(old, offset=offset, strides=strides)
        return old

    return rebuilt(expr, leaf, made)


def strides_in(*roots: Expr) -> list[Shape]:
    """The strides of all loads under these expressions."""
    found = [expr.place.strides for expr in nodes(*roots) if isinstance(expr, Load | Gather)]
    return found + [expr.strides for expr in nodes(*roots) if isinstance(expr, Iota)]


def arrays_in(*roots: Expr) -> set[Array]:
    """The arrays that these expressions load from."""
    return {expr.place.array for expr in nodes(*roots) if isinstance(expr, Load | Gather)}


def reads(statement: Statement) -> set[Array]:
    """The arrays that a statement loads from."""
    if isinstance(statement, Draw):
        return arrays_in(statement.seed, statement.step)
    if isinstance(statement, Scatter):
        indices = [along.index for along in statement.along]
        return arrays_in(statement.value, *indices) | {statement.place.array}
    if isinstance(statement, Scan):
        return arrays_in(statement.value)
    found = arrays_in(*(out.value for out in statement.outs))
    if isinstance(statement, Reduce):
        found |= arrays_in(statement.value)
    if isinstance(statement, Product):
        found |= {statement.left.array, statement.right.array}
    return found


def writes(statement: Statement) -> set[Array]:
    """The arrays that a statement stores into."""
    if isinstance(statement, Draw):
        return {statement.array}
    if isinstance(statement, Scatter | Scan):
        return {statement.place.array}
    return {out.place.array for out in statement.outs}


def reshaped(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of the same elements in another shape, or None where there are none.

    >>> reshaped((2, 3, 4), (12, 4, 1), (6, 4)), reshaped((3, 2), (1, 3), (6,))
    ((4, 1), None)
    >>> reshaped((2, 3), (0, 1), (2, 3, 1))
    (0, 1, 0)
    """
    if prod(shape) == 0 or prod(shape) == 1:
        return (0,) * len(new)
    old = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    made: list[int] = []
    at = 0
    sizes = [size for size in new if size != 1]
    place = 0
    while at < len(old):
        first, count = at, old[at][0]
        second, wanted = place, sizes[place]
        while count != wanted:
            if count < wanted:
                at += 1
                count *= old[at][0]
            else:
                place += 1
                wanted *= sizes[place]
        group = old[first : at + 1]
        if any(a[1] != b[1] * b[0] for a, b in pairwise(group)):
            return None
        step = group[-1][1]
        own: list[int] = []
        for size in reversed(sizes[second : place + 1]):
            own.append(step)
            step *= size
        made += reversed(own)
        at, place = at + 1, place + 1
    rest = iter(made)
    return tuple(next(rest) if size != 1 else 0 for size in new)


def collapsed(space: Shape, all_strides: Sequence[Shape]) -> tuple[Shape, list[Shape]]:
    """The space with as few dimensions as possible: those that all go through as through one are one.

    >>> collapsed((4, 8), [(8, 1), (0, 0)]), collapsed((4, 8), [(8, 1), (0, 1)])
    (((32,), [(1,), (0,)]), ((4, 8), [(8, 1), (0, 1)]))
    """
    keep = [d for d, size in enumerate(space) if size != 1]
    sizes = [space[d] for d in keep]
    columns = [[strides[d] for d in keep] for strides in all_strides]
    at = len(sizes) - 2
    while at >= 0:
        if all(column[at] == column[at + 1] * sizes[at + 1] for column in columns):
            sizes[at] *= sizes.pop(at + 1)
            for column in columns:
                column[at] = column.pop(at + 1)
        at -= 1
    return tuple(sizes), [tuple(column) for column in columns]
