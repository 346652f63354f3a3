"""Whether a step computes each sample of its batch by itself.

Every element of every array is marked with the samples that it is made of, statement after statement: so this
knows no operators, and what is true of the loops is true of the program. Where places are computed (an
embedding's rows, say) all that may be found there counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np

from carpool.kernels.resident.loops import (
    Acc,
    Along,
    Array,
    Expr,
    Gather,
    Iota,
    Load,
    Map,
    Op,
    Place,
    Product,
    Reduce,
    Scan,
    Scatter,
    Shape,
    Statement,
)

Marks = np.ndarray
"""For each element a set of bits. Two samples differ in one bit at least, and each bit has its opposite."""
_MOST = 1 << 26  # elements looked at in one statement; for more nobody waits


class _Unknown(Exception):
    """A statement that is not looked into."""


def is_apart(statements: Iterable[Statement], given: Mapping[Array, int], told: Iterable[Array]) -> bool:
    """Whether each told array's rows are made of one sample each: the row of that number, of those that are `given`.

    `given` arrays have as many rows as it says, and so must those that are told.
    """
    known = _Marked()
    for array, rows in given.items():
        known.marks(array)[:] = np.repeat(_of_samples(rows), array.size // rows)
    try:
        for statement in statements:
            known.take(statement)
    except _Unknown:
        return False
    sizes = set(given.values())
    for array in told:
        if len(sizes) != 1 or array.shape[:1] != tuple(sizes):
            return False
        rows = array.shape[0]
        own = _of_samples(rows)[:, None]
        if (known.marks(array).reshape(rows, -1) & ~own).any():
            return False
    return True


def _of_samples(count: int) -> Marks:
    """The marks of each sample: the bits of its number, and behind these their opposites."""
    bits = max(1, (count - 1).bit_length())
    numbers = np.arange(count, dtype=np.uint64)
    return numbers | (~numbers & np.uint64((1 << bits) - 1)) << np.uint64(bits)


class _Marked:
    """What all arrays are marked with so far; those that are not here hold nothing of a sample."""

    def __init__(self) -> None:
        self._marks: dict[Array, Marks] = {}

    def marks(self, array: Array) -> Marks:
        if array not in self._marks:
            self._marks[array] = np.zeros(array.size, np.uint64)
        return self._marks[array]

    def take(self, statement: Statement) -> None:
        if prod(getattr(statement, "space", ())) == 0:
            return
        if isinstance(statement, Map):
            self._store(statement.space, [(out.place, out.value) for out in statement.outs])
        elif isinstance(statement, Reduce):
            whole = np.broadcast_to(self._of(statement.value, statement.space), statement.space)
            over = tuple(range(statement.kept, len(statement.space)))
            made = np.bitwise_or.reduce(whole, axis=over) if over else whole
            kept = statement.space[: statement.kept]
            self._store(kept, [(out.place, out.value) for out in statement.outs], made)
        elif isinstance(statement, Product):
            batch, space = statement.batch, statement.space
            left = self._read(statement.left, (*batch, statement.rows, statement.depth))
            right = self._read(statement.right, (*batch, statement.depth, statement.columns))
            made = _any(left, -1)[..., :, None] | _any(right, -2)[..., None, :]
            made = np.broadcast_to(made, space)
            self._store(space, [(out.place, out.value) for out in statement.outs], made)
        elif isinstance(statement, Scan):
            whole = np.broadcast_to(self._of(statement.value, statement.space), statement.space)
            made = np.bitwise_or.accumulate(whole, axis=-1)
            self._store(statement.space, [(statement.place, Acc(statement.value.type))], made)
        elif isinstance(statement, Scatter):
            self._scatter(statement)
        else:
            raise _Unknown

    def _store(self, space: Shape, outs: Sequence[tuple[Place, Expr]], made: Marks | None = None) -> None:
        found = [np.broadcast_to(self._of(value, space, made), space) for _, value in outs]
        for (place, _), marks in zip(outs, found, strict=True):
            if any(stride == 0 and size > 1 for stride, size in zip(place.strides, space, strict=True)):
                raise _Unknown  # elements of one place
            if marks.any() or place.array in self._marks:
                _strided(self.marks(place.array), place.offset, space, place.strides)[...] = marks

    def _scatter(self, statement: Scatter) -> None:
        """Any element may come to any place that its indices may say."""
        marks = self._of(statement.value, statement.space)
        place, strides, offset, free = statement.place, statement.place.strides, statement.place.offset, []
        for one in statement.along:
            marks = marks | self._of(one.index, statement.space)
            if isinstance(one.index, Iota):
                offset, strides = _with(one, offset, strides)
            else:
                free.append(one)
        space = statement.space
        marks = np.broadcast_to(marks, space)
        if not marks.any():
            return
        # Indices that stand still in a dimension are the same place; OR is the same in any order.
        at = offset + _places(space, strides)
        for one in free:
            at = at[..., None] + one.stride * np.arange(one.bound)
            marks = marks[..., None]
            if at.size > _MOST:
                raise _Unknown
        np.bitwise_or.at(self.marks(place.array), at, np.broadcast_to(marks, at.shape))

    def _of(
        self, expr: Expr, space: Shape, made: Marks | None = None, known: dict[int, Marks] | None = None
    ) -> Marks:
        """The marks of an expression's value, in a shape that broadcasts to the space."""
        known = {} if known is None else known
        if id(expr) not in known:
            known[id(expr)] = self._looked_up(expr, space, made, known)
        return known[id(expr)]

    def _looked_up(self, expr: Expr, space: Shape, made: Marks | None, known: dict[int, Marks]) -> Marks:
        if isinstance(expr, Acc):
            assert made is not None
            return made
        if isinstance(expr, Load):
            return self._read(expr.place, space)
        if isinstance(expr, Gather):
            return self._gathered(expr, space, made, known)
        found = np.zeros((), np.uint64)
        if isinstance(expr, Op):
            for arg in expr.args:
                found = found | self._of(arg, space, made, known)
        return found

    def _gathered(self, expr: Gather, space: Shape, made: Marks | None, known: dict[int, Marks]) -> Marks:
        found = np.zeros((), np.uint64)
        offset, strides = expr.place.offset, expr.place.strides
        free: list[Along] = []
        for one in expr.along:
            found = found | self._of(one.index, space, made, known)
            if isinstance(one.index, Iota):
                offset, strides = _with(one, offset, strides)
            else:
                free.append(one)
        if expr.place.array not in self._marks:
            return found
        bounds = tuple(one.bound for one in free)
        place = Place(expr.place.array, offset, (*strides, *(one.stride for one in free)))
        whole = self._read(place, (*space, *bounds))
        over = tuple(range(len(space), len(space) + len(bounds)))
        return found | (np.bitwise_or.reduce(whole, axis=over) if over else whole)

    def _read(self, place: Place, space: Shape) -> Marks:
        if place.array not in self._marks:
            return np.zeros((1,) * len(space), np.uint64)
        if prod(space) > _MOST:
            raise _Unknown
        return _strided(self._marks[place.array], place.offset, space, place.strides)


def _with(one: Along, offset: int, strides: Shape) -> tuple[int, Shape]:
    """A place that goes on along a dimension by an affine number, which is affine too."""
    assert isinstance(one.index, Iota)
    own = one.index.strides or (0,) * len(strides)
    both = tuple(a + one.stride * b for a, b in zip(strides, own, strict=True))
    return offset + one.stride * one.index.offset, both


def _places(space: Shape, strides: Shape) -> np.ndarray:
    made = np.zeros((1,) * len(space), np.int64)
    for dim, (size, stride) in enumerate(zip(space, strides, strict=True)):
        made = made + (np.arange(size) * stride).reshape(-1, *(1,) * (len(space) - dim - 1))
    return np.broadcast_to(made, space)


def _any(marks: Marks, dim: int) -> Marks:
    return np.bitwise_or.reduce(marks, axis=dim)


def _strided(flat: Marks, offset: int, space: Shape, strides: Shape) -> Marks:
    step = flat.itemsize
    low = offset + sum(min(0, (size - 1) * stride) for size, stride in zip(space, strides, strict=True))
    high = offset + sum(max(0, (size - 1) * stride) for size, stride in zip(space, strides, strict=True))
    if low < 0 or high >= len(flat):
        raise _Unknown
    return np.lib.stride_tricks.as_strided(flat[offset:], space, tuple(step * stride for stride in strides))
