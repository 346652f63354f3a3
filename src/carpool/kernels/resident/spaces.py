"""The spaces of loops in as few dimensions as possible, and what lies side by side in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from carpool.kernels.resident.loops import (
    Expr,
    Gather,
    Out,
    Reduce,
    Shape,
    collapsed,
    moved,
    nodes,
    strides_in,
)


def unit(values: Sequence[Expr], dim: int) -> int:
    """How many loads go on side by side along a dimension."""
    return sum(strides[dim] == 1 for strides in strides_in(*values) if strides)


def covers(outs: Sequence[Out], size: int) -> bool:
    """Whether outs are whole arrays of what lies side by side: then a few elements more may be computed."""
    read = strides_in(*(out.value for out in outs))
    return all(
        out.place.offset == 0 and out.place.strides == (1,) and out.place.array.size == size for out in outs
    ) and all(strides[-1] in (0, 1) for strides in read)


def fits_lanes(values: Sequence[Expr]) -> bool:
    """Whether all loads go on from a place that is computed once for all lanes."""
    for expr in nodes(*values):
        if isinstance(expr, Gather) and any(
            strides[-1:] not in ((), (0,)) for one in expr.along for strides in strides_in(one.index)
        ):
            return False
    return True


def simplest(space: Shape, outs: Sequence[Out]) -> tuple[Shape, list[Out]]:
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


def split(statement: Reduce) -> tuple[Shape, Shape, Expr, list[Out]]:
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


def last_kept_last(kept: int, over: int) -> Callable[[int, Shape], tuple[int, Shape]]:
    """The way into a space in which the last of the kept dimensions comes after all that are reduced."""

    def move(offset: int, strides: Shape) -> tuple[int, Shape]:
        return offset, (*strides[: kept - 1], *strides[kept : kept + over], strides[kept - 1])

    return move
