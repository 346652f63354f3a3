"""Loops put together: what only one loop reads is computed in it, and never lies in memory.

A product's sums, say, are still in registers when its bias, its activation or its optimizer's update comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from carpool.kernels.resident.loops import (
    Acc,
    Array,
    Expr,
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
    nodes,
    reads,
    rebuilt,
    reshaped,
    whole,
    writes,
)

_MOST = 160  # operations of one loop's element


def merged(statements: Sequence[Statement], needed: Collection[Array]) -> list[Statement]:
    """The statements with as few passes over memory as there can be. `needed` arrays are read by others, too."""
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
            if joined is None or _is_disturbed(before, made[place + 1 : later]):
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


def _is_disturbed(moved: Statement, between: Sequence[Statement]) -> bool:
    """Whether statements in between write what the moved one reads."""
    own = reads(moved)
    return any(not own.isdisjoint(writes(statement)) for statement in between)


def _joined(before: Map | Product | Reduce, after: Statement) -> Statement | None:
    """The later statement with the earlier one inside."""
    out = before.outs[0]
    if isinstance(after, Map):
        return _into_map(before, out, after)
    if isinstance(before, Map) and isinstance(after, Reduce):
        return _into_reduce(before, out, after)
    return None


def _space(statement: Map | Product | Reduce) -> Shape:
    return statement.space[: statement.kept] if isinstance(statement, Reduce) else statement.space


def _into_map(before: Map | Product | Reduce, out: Out, after: Map) -> Statement | None:
    space = _space(before)
    loads = [
        expr
        for expr in nodes(*(one.value for one in after.outs))
        if not isinstance(expr, Op) and isinstance(expr, Load) and expr.place.array == out.place.array
    ]
    if not loads or len(arrays_in(*loads)) != 1 or not _is_whole(out.place, space):
        return None
    if any(isinstance(expr, Load) is False for expr in loads):
        return None
    size = sum(isinstance(expr, Op) for expr in nodes(out.value, *(one.value for one in after.outs)))
    if size > _MOST:
        return None
    if isinstance(before, Map):
        return _inlined(before, out, after, loads)
    outs = _in_space(after, space, loads)
    if outs is None:
        return None
    value = out.value

    def leaf(expr: Expr) -> Expr:
        return value if isinstance(expr, Load) and expr.place.array == out.place.array else expr

    memo: dict[int, Expr] = {}
    return replace(before, outs=tuple(Out(one.place, rebuilt(one.value, leaf, memo)) for one in outs))


def _is_whole(place: Place, space: Shape) -> bool:
    return place.offset == 0 and _same(space, place.strides, contiguous(space))


def _same(space: Shape, some: Shape, others: Shape) -> bool:
    return all(a == b or size == 1 for size, a, b in zip(space, some, others, strict=True))


def _in_space(after: Map, space: Shape, loads: Sequence[Load]) -> list[Out] | None:
    """The outs of a map in the space of the statement before it, if each element reads its own element there."""
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


def _reordered(out: Out, own: Shape, space: Shape, order: tuple[int, ...]) -> Out | None:
    turned = tuple(own[dim] for dim in order)

    def move(strides: Shape) -> Shape | None:
        return reshaped(turned, tuple(strides[dim] for dim in order), space)

    if _count(turned) != _count(space):
        return None
    place = move(out.place.strides)
    if place is None:
        return None
    failed = False

    def leaf(expr: Expr) -> Expr:
        nonlocal failed
        strides = getattr(expr, "strides", None)
        if strides is None and hasattr(expr, "place"):
            strides = expr.place.strides  # type: ignore[attr-defined]
        if strides is None:
            return expr
        new = move(strides)
        if new is None:
            failed = True
            return expr
        if hasattr(expr, "place"):
            return replace(expr, place=replace(expr.place, strides=new))  # type: ignore[attr-defined]
        return replace(expr, strides=new)  # type: ignore[call-arg]

    value = rebuilt(out.value, leaf)
    return None if failed else Out(replace(out.place, strides=place), value)


def _count(shape: Shape) -> int:
    made = 1
    for size in shape:
        made *= size
    return made


def _inlined(before: Map, out: Out, after: Map, loads: Sequence[Load]) -> Map | None:
    """A map computed in the map that reads it, where that reads each element once and in the same shape."""
    if any(
        load.place.offset != 0 or not _same(after.space, load.place.strides, contiguous(after.space))
        for load in loads
    ) or _count(after.space) != _count(before.space):
        return None
    moved_out = _reordered(out, before.space, after.space, tuple(range(len(before.space))))
    if moved_out is None:
        return None

    def leaf(expr: Expr) -> Expr:
        return moved_out.value if isinstance(expr, Load) and expr.place.array == out.place.array else expr

    memo: dict[int, Expr] = {}
    return Map(after.space, tuple(Out(one.place, rebuilt(one.value, leaf, memo)) for one in after.outs))


def _into_reduce(before: Map, out: Out, after: Reduce) -> Reduce | None:
    """A map computed in the reduction that reads it."""
    loads = [
        expr for expr in nodes(after.value) if isinstance(expr, Load) and expr.place.array == out.place.array
    ]
    if out.place.array in arrays_in(*(one.value for one in after.outs)) or not loads:
        return None
    strides = {load.place.strides for load in loads}
    if (
        len(strides) != 1
        or any(load.place.offset for load in loads)
        or _count(after.space) != _count(before.space)
    ):
        return None
    order = sorted(
        range(len(after.space)), key=lambda dim: -next(iter(strides))[dim] if after.space[dim] > 1 else 0
    )
    turned = tuple(after.space[dim] for dim in order)
    if not _same(turned, tuple(next(iter(strides))[dim] for dim in order), contiguous(turned)):
        return None
    if not _is_whole(out.place, before.space):
        return None
    flat = _reordered(out, before.space, turned, tuple(range(len(before.space))))
    if flat is None:
        return None
    back = [order.index(dim) for dim in range(len(order))]

    def unturned(expr: Expr) -> Expr:
        if hasattr(expr, "place"):
            own = expr.place.strides  # type: ignore[attr-defined]
            return replace(expr, place=replace(expr.place, strides=tuple(own[dim] for dim in back)))  # type: ignore[attr-defined]
        if hasattr(expr, "strides"):
            own = expr.strides  # type: ignore[attr-defined]
            return replace(expr, strides=tuple(own[dim] for dim in back))  # type: ignore[call-arg]
        return expr

    value = rebuilt(flat.value, unturned)

    def leaf(expr: Expr) -> Expr:
        return value if isinstance(expr, Load) and expr.place.array == out.place.array else expr

    return replace(after, value=rebuilt(after.value, leaf))


# Products


def oriented(product: Product) -> Product | None:
    """The product so that its columns lie side by side in its right operand, and as well as can be in its outs; or None."""
    ways = [way for way in (product, _exchanged(product)) if way.right.strides[-1] == 1 or way.columns == 1]
    return min(ways, key=_awkward, default=None)


def _awkward(product: Product) -> tuple[int, float]:
    """How many loads and stores do not lie side by side, and the share of lanes that compute for nothing."""
    strides = [out.place.strides for out in product.outs]
    strides += [
        expr.place.strides for expr in nodes(*(out.value for out in product.outs)) if isinstance(expr, Load)
    ]
    lanes = -(-product.columns // 8) * 8
    return sum(own[-1] not in (0, 1) for own in strides), lanes / product.columns


def _exchanged(product: Product) -> Product:
    """The product of the transposed operands: rows are columns."""

    def swap(strides: Shape) -> Shape:
        return (*strides[:-2], strides[-1], strides[-2])

    def leaf(expr: Expr) -> Expr:
        if hasattr(expr, "place"):
            return replace(expr, place=replace(expr.place, strides=swap(expr.place.strides)))  # type: ignore[attr-defined]
        return replace(expr, strides=swap(expr.strides)) if hasattr(expr, "strides") else expr  # type: ignore[attr-defined, call-arg]

    memo: dict[int, Expr] = {}
    outs = tuple(
        Out(replace(out.place, strides=swap(out.place.strides)), rebuilt(out.value, leaf, memo))
        for out in product.outs
    )
    left = replace(product.right, strides=swap(product.right.strides))
    right = replace(product.left, strides=swap(product.left.strides))
    return replace(product, rows=product.columns, columns=product.rows, left=left, right=right, outs=outs)


def turned_copy(product: Product, array: Array) -> tuple[Map, Product]:
    """The right operand laid side by side first."""
    space = (*product.batch, product.depth, product.columns)
    copy = Map(space, (Out(whole(array), Load(array.type, product.right)),))
    return copy, replace(product, right=whole(array))


__all__ = ["Acc", "merged", "oriented", "turned_copy"]
