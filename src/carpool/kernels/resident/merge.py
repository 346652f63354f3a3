"""Loops put together: what only one loop reads is computed in it, and never lies in memory.

A product's sums, say, are still in registers when its bias, its activation or its optimizer's update comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import prod

from carpool.kernels.resident.loops import (
    Array,
    Expr,
    Gather,
    Load,
    Map,
    Op,
    Out,
    Place,
    Product,
    Reduce,
    Shape,
    Statement,
    arrays_in,
    contiguous,
    moved,
    nodes,
    reads,
    rebuilt,
    reshaped,
    writes,
)

_MOST = 160  # operations of one loop's element


def merged(statements: Sequence[Statement], needed: Collection[Array]) -> list[Statement]:
    """The statements with as few passes over memory as can be. `needed` arrays are read by others, too."""
    made = list(statements)
    changed, known = True, _Known()
    while changed:
        changed = False
        made = _useful(made, needed, known)
        readers = Counter(array for statement in made for array in known.of(statement))
        writers = Counter(array for statement in made for array in writes(statement))
        for place in range(len(made)):
            before = made[place]
            if not isinstance(before, Map | Product | Reduce) or len(before.outs) != 1:
                continue
            array = before.outs[0].place.array
            if array in needed or array.kept or readers[array] != 1 or writers[array] != 1:
                continue
            later = next(at for at in range(place + 1, len(made)) if array in known.of(made[at]))
            joined = _joined(before, made[later])
            if joined is None or not _is_sound(joined) or _is_disturbed(before, made[place + 1 : later]):
                continue
            made[later] = joined
            del made[place]
            changed = True
            break
    return made


class _Known:
    """What statements read, each looked at once."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Statement, set[Array]]] = {}

    def of(self, statement: Statement) -> set[Array]:
        if id(statement) not in self._found:
            self._found[id(statement)] = (statement, reads(statement))
        return self._found[id(statement)][1]


def _useful(statements: Sequence[Statement], needed: Collection[Array], known: _Known) -> list[Statement]:
    """Without those whose arrays nobody reads."""
    wanted = set(needed)
    kept: list[Statement] = []
    for statement in reversed(statements):
        if any(array in wanted or array.kept for array in writes(statement)):
            kept.append(statement)
            wanted |= known.of(statement)
    return kept[::-1]


def _is_disturbed(before: Statement, between: Sequence[Statement]) -> bool:
    """Whether statements in between write what the one before them reads."""
    own = reads(before)
    return any(not own.isdisjoint(writes(statement)) for statement in between)


def _is_sound(joined: Map | Product | Reduce) -> bool:
    """Whether no element reads what is stored for another: it is read where it is written."""
    stored = {out.place.array: out.place for out in joined.outs}
    if isinstance(joined, Product) and {joined.left.array, joined.right.array} & stored.keys():
        return False
    if isinstance(joined, Reduce) and arrays_in(joined.value) & stored.keys():
        return False
    for expr in nodes(*(out.value for out in joined.outs)):
        if isinstance(expr, Gather) and expr.place.array in stored:
            return False
        if isinstance(expr, Load) and expr.place != stored.get(expr.place.array, expr.place):
            return False
    return True


def _joined(before: Map | Product | Reduce, after: Statement) -> Map | Product | Reduce | None:
    """The later statement with the earlier one inside."""
    out = before.outs[0]
    if isinstance(after, Map):
        return _into_map(before, out, after)
    if isinstance(before, Map) and isinstance(after, Reduce):
        return _into_reduce(before, out, after)
    return None


def _space(statement: Map | Product | Reduce) -> Shape:
    return statement.space[: statement.kept] if isinstance(statement, Reduce) else statement.space


def _into_map(before: Map | Product | Reduce, out: Out, after: Map) -> Map | Product | Reduce | None:
    space = _space(before)
    loads = _loads_of(out.place.array, *(one.value for one in after.outs))
    if loads is None or not _is_whole(out.place, space):
        return None
    size = sum(isinstance(expr, Op) for expr in nodes(out.value, *(one.value for one in after.outs)))
    if size > _MOST:
        return None
    if isinstance(before, Map):
        return _inlined(before, out, after, loads)
    outs = _in_space(after, space, loads)
    if outs is None:
        return None
    leaf, memo = _in_place_of(out.place.array, out.value), dict[int, Expr]()
    return replace(before, outs=tuple(Out(one.place, rebuilt(one.value, leaf, memo)) for one in outs))


def _loads_of(array: Array, *values: Expr) -> list[Load] | None:
    """All loads from an array; None where there are none, or where something is looked up in it."""
    found = [e for e in nodes(*values) if isinstance(e, Load | Gather) and e.place.array == array]
    loads = [expr for expr in found if isinstance(expr, Load)]
    return loads if loads and len(loads) == len(found) else None


def _in_place_of(array: Array, value: Expr) -> Callable[[Expr], Expr]:
    """What gives this value instead of a load from an array."""
    return lambda expr: value if isinstance(expr, Load) and expr.place.array == array else expr


def _is_whole(place: Place, space: Shape) -> bool:
    return place.offset == 0 and _same(space, place.strides, contiguous(space))


def _same(space: Shape, some: Shape, others: Shape) -> bool:
    return all(a == b or size == 1 for size, a, b in zip(space, some, others, strict=True))


def _in_space(after: Map, space: Shape, loads: Sequence[Load]) -> list[Out] | None:
    """The outs of a map in the space of the statement before it, if each element reads its own."""
    outs = []
    for order in _orders(after.space, space):
        turned = [_reordered(one, after.space, space, order) for one in after.outs]
        if any(one is None for one in turned):
            continue
        outs = [one for one in turned if one is not None]
        found = [
            expr.place
            for expr in nodes(*(one.value for one in outs))
            if isinstance(expr, Load) and expr.place.array == loads[0].place.array
        ]
        if all(place.offset == 0 and _same(space, place.strides, contiguous(space)) for place in found):
            return outs
    return None


def _orders(own: Shape, space: Shape) -> list[tuple[int, ...]]:
    """How the map's dimensions may be turned: as they are, or the last two exchanged."""
    rank = len(own)
    plain = tuple(range(rank))
    return [plain] if rank < 2 else [plain, (*plain[:-2], rank - 1, rank - 2)]


class _Apart(Exception):
    """No strides go through an array as the loop would have to."""


def _reordered(out: Out, own: Shape, space: Shape, order: tuple[int, ...]) -> Out | None:
    """An out in another space of as many elements, its dimensions turned first."""
    turned = tuple(own[dim] for dim in order)
    if prod(turned) != prod(space):
        return None

    def move(offset: int, strides: Shape) -> tuple[int, Shape]:
        new = reshaped(turned, tuple(strides[dim] for dim in order), space)
        if new is None:
            raise _Apart
        return offset, new

    try:
        _, strides = move(0, out.place.strides)
        return Out(replace(out.place, strides=strides), moved(out.value, move))
    except _Apart:
        return None


def _inlined(before: Map, out: Out, after: Map, loads: Sequence[Load]) -> Map | None:
    """A map computed in the map that reads it, where that reads each element once and in the same shape."""
    if any(
        load.place.offset != 0 or not _same(after.space, load.place.strides, contiguous(after.space))
        for load in loads
    ) or prod(after.space) != prod(before.space):
        return None
    new = _reordered(out, before.space, after.space, tuple(range(len(before.space))))
    if new is None:
        return None
    leaf, memo = _in_place_of(out.place.array, new.value), dict[int, Expr]()
    return Map(after.space, tuple(Out(one.place, rebuilt(one.value, leaf, memo)) for one in after.outs))


def _into_reduce(before: Map, out: Out, after: Reduce) -> Reduce | None:
    """A map computed in the reduction that reads it."""
    loads = _loads_of(out.place.array, after.value)
    if loads is None or out.place.array in arrays_in(*(one.value for one in after.outs)):
        return None
    strides = loads[0].place.strides
    if any(load.place.offset or load.place.strides != strides for load in loads):
        return None
    if prod(after.space) != prod(before.space) or not _is_whole(out.place, before.space):
        return None
    order = sorted(range(len(after.space)), key=lambda dim: -strides[dim] if after.space[dim] > 1 else 0)
    turned = tuple(after.space[dim] for dim in order)
    if not _same(turned, tuple(strides[dim] for dim in order), contiguous(turned)):
        return None
    flat = _reordered(out, before.space, turned, tuple(range(len(before.space))))
    if flat is None:
        return None
    back = [order.index(dim) for dim in range(len(order))]
    value = moved(flat.value, lambda offset, own: (offset, tuple(own[dim] for dim in back)))
    return replace(after, value=rebuilt(after.value, _in_place_of(out.place.array, value)))


# Products


def oriented(product: Product, lanes: int) -> Product | None:
    """The product so that columns lie side by side in its right operand, and best in its outs; or None."""
    ways = [way for way in (product, exchanged(product)) if way.right.strides[-1] == 1 or way.columns == 1]
    return min(ways, key=lambda way: _awkward(way, lanes), default=None)


def _awkward(product: Product, lanes: int) -> tuple[int, float]:
    """How many loads and stores do not lie side by side, and the share of lanes that compute for nothing."""
    strides = [out.place.strides for out in product.outs]
    strides += [
        expr.place.strides for expr in nodes(*(out.value for out in product.outs)) if isinstance(expr, Load)
    ]
    taken = -(-product.columns // lanes) * lanes
    return sum(own[-1] not in (0, 1) for own in strides), taken / product.columns


def exchanged(product: Product) -> Product:
    """The product of the transposed operands: rows are columns."""

    def swap(offset: int, strides: Shape) -> tuple[int, Shape]:
        return offset, (*strides[:-2], strides[-1], strides[-2])

    def turned(place: Place) -> Place:
        return replace(place, strides=swap(0, place.strides)[1])

    memo: dict[int, Expr] = {}
    outs = tuple(Out(turned(out.place), moved(out.value, swap, memo)) for out in product.outs)
    left, right = turned(product.right), turned(product.left)
    return replace(product, rows=product.columns, columns=product.rows, left=left, right=right, outs=outs)
