"""Values on their way to loops: each is an expression over a space, until something needs it in memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

from carpool.kernels.resident.loops import (
    Acc,
    Array,
    Const,
    Expr,
    Load,
    Map,
    Move,
    Op,
    Out,
    Place,
    Product,
    Reduce,
    Shape,
    Statement,
    Type,
    contiguous,
    moved,
    nodes,
    reshaped,
    strides_in,
    whole,
)

_DEAR = {
    "exp",
    "log",
    "log1p",
    "expm1",
    "tanh",
    "erf",
    "sin",
    "cos",
    "pow",
    "sigmoid",
    "div",
    "sqrt",
    "rsqrt",
}
_MOST = 48  # operations of one loop's element; more are cut in two


class Refused(Exception):
    """What cannot be computed this way; its text names the operator or says what is in the way."""


class Value:
    """An array that is computed where it is used, or lies in memory. `expr` is over a space of its shape."""

    def __init__(self, shape: Sequence[int], expr: Expr) -> None:
        self.shape: Shape = tuple(shape)
        self.expr = expr

    @property
    def type(self) -> Type:
        return self.expr.type

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def place(self) -> Place | None:
        """Where it lies, if it lies somewhere."""
        return self.expr.place if type(self.expr) is Load else None

    @property
    def is_contiguous(self) -> bool:
        place = self.place
        return place is not None and (
            reshaped(self.shape, place.strides, (self.size,)) in ((1,), (0,)) if self.size > 1 else True
        )


class Builder:
    """Collects the statements of a step, in the order in which they run."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.held: dict[str, tuple[Array, Any]] = {}
        """Arrays that the step brings along, by name, each with what it is read from."""
        self._count = 0

    # Arrays

    def array(self, type: Type, shape: Sequence[int], name: str = "", kept: bool = False) -> Array:
        self._count += 1
        return Array(name or f"t{self._count}", type, tuple(shape), kept)

    def lying(self, array: Array) -> Value:
        return Value(array.shape, Load(array.type, whole(array)))

    def constant(self, shape: Sequence[int], value: float | int | bool, type: Type) -> Value:
        return Value(shape, Const(type, value))

    def stored(self, value: Value) -> Value:
        """The value in memory, in whatever strides; from now on everybody finds it there."""
        if value.place is None:
            array = self.array(value.type, value.shape)
            self.statements.append(Map(value.shape, (Out(whole(array), value.expr),)))
            value.expr = Load(array.type, whole(array))
        return value

    def place(self, value: Value) -> Place:
        """Where the value lies in memory; it is stored if it lies nowhere."""
        place = self.stored(value).place
        assert place is not None
        return place

    def filled(self, type: Type, shape: Sequence[int], number: float | int | bool) -> Value:
        """An array of its own in which each element is this number."""
        array = self.array(type, shape)
        self.into(whole(array), Value(array.shape, Const(type, number)))
        return self.lying(array)

    def copied(self, value: Value) -> Value:
        """An array of its own with what the value holds now."""
        array = self.array(value.type, value.shape)
        self.into(whole(array), value)
        return self.lying(array)

    def packed(self, value: Value) -> Value:
        """The value in memory, its elements one after another."""
        place = self.place(value)
        wanted = contiguous(value.shape)
        if all(
            own == want or size == 1
            for own, want, size in zip(place.strides, wanted, value.shape, strict=True)
        ):
            return value
        return self.copied(value)

    def shared(self, value: Value, users: int) -> None:
        """Stores a value that several use, if it is dear to compute; or that has become long."""
        operations = [expr for expr in nodes(value.expr) if isinstance(expr, Op)]
        dear = any(expr.name in _DEAR for expr in operations)
        again = users > 1 and operations and (dear or value.type in ("f4", "f8") or len(operations) > 3)
        if again or len(operations) > _MOST:
            self.stored(value)

    # Views

    def view(self, value: Value, shape: Sequence[int], move: Move) -> Value:
        return Value(shape, moved(value.expr, move))

    def permuted(self, value: Value, dims: Sequence[int]) -> Value:
        dims = [dim % len(value.shape) for dim in dims]
        return self.view(
            value, [value.shape[d] for d in dims], lambda at, strides: (at, tuple(strides[d] for d in dims))
        )

    def expanded(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcast as NumPy does: new dimensions in front, those of size one as long as wanted."""
        lead = len(shape) - len(value.shape)
        sizes = [
            own if size == -1 else size for size, own in zip(shape, (*[1] * lead, *value.shape), strict=True)
        ]
        if tuple(sizes) == value.shape:
            return value
        is_one = [own == 1 and size != 1 for own, size in zip(value.shape, sizes[lead:], strict=True)]

        def move(at: int, strides: Shape) -> tuple[int, Shape]:
            own = [0 if one else stride for one, stride in zip(is_one, strides, strict=True)]
            return at, (*[0] * lead, *own)

        return self.view(value, sizes, move)

    def reshaped(self, value: Value, shape: Sequence[int]) -> Value:
        shape = list(shape)
        if -1 in shape:
            rest = prod(size for size in shape if size != -1)
            shape[shape.index(-1)] = value.size // max(1, rest)
        if tuple(shape) == value.shape:
            return value
        if any(reshaped(value.shape, strides, tuple(shape)) is None for strides in strides_in(value.expr)):
            value = self.packed(value)

        def move(at: int, strides: Shape) -> tuple[int, Shape]:
            new = reshaped(value.shape, strides, tuple(shape))
            assert new is not None
            return at, new

        return self.view(value, shape, move)

    def sliced(self, value: Value, dim: int, start: int, size: int, step: int = 1) -> Value:
        dim %= len(value.shape)
        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        return self.view(
            value,
            shape,
            lambda at, strides: (
                at + start * strides[dim],
                (*strides[:dim], strides[dim] * step, *strides[dim + 1 :]),
            ),
        )

    def selected(self, value: Value, dim: int, index: int) -> Value:
        dim %= len(value.shape)
        at = index + value.shape[dim] if index < 0 else index
        return self.squeezed(self.sliced(value, dim, at, 1), dim)

    def squeezed(self, value: Value, dim: int) -> Value:
        dim %= len(value.shape)
        if value.shape[dim] != 1:
            return value
        shape = (*value.shape[:dim], *value.shape[dim + 1 :])
        return self.view(value, shape, lambda at, strides: (at, (*strides[:dim], *strides[dim + 1 :])))

    def unsqueezed(self, value: Value, dim: int) -> Value:
        dim %= len(value.shape) + 1
        shape = (*value.shape[:dim], 1, *value.shape[dim:])
        return self.view(value, shape, lambda at, strides: (at, (*strides[:dim], 0, *strides[dim:])))

    # Loops

    def reduced(
        self,
        kind: Literal["sum", "max", "min", "prod", "argmax", "argmin"],
        value: Value,
        dims: Sequence[int],
        keepdim: bool = False,
    ) -> Value:
        """Over these dimensions."""
        if value.type == "u1":
            counted = self.reduced(kind, Value(value.shape, Op("i4", "cast", (value.expr,))), dims, keepdim)
            return Value(counted.shape, Op("u1", "cast", (counted.expr,)))
        rank = len(value.shape)
        over = sorted(dim % rank for dim in dims) if rank else []
        kept = [dim for dim in range(rank) if dim not in over]
        turned = self.permuted(value, [*kept, *over])
        made: Type = "i8" if kind.startswith("arg") else value.type
        shape = tuple(value.shape[dim] for dim in kept)
        array = self.array(made, shape)
        out = Out(whole(array), Acc(made))
        self.statements.append(Reduce(kind, turned.shape, len(kept), turned.expr, (out,)))
        result = self.lying(array)
        if keepdim:
            for dim in over:
                result = self.unsqueezed(result, dim)
        return result

    def product(self, left: Value, right: Value) -> Value:
        """Matrix products of [batch..., rows, depth] and [batch..., depth, columns]."""
        left, right = self.stored(left), self.stored(right)
        assert left.place is not None
        assert right.place is not None
        *batch, rows, depth = left.shape
        columns = right.shape[-1]
        array = self.array(left.type, (*batch, rows, columns))
        out = Out(whole(array), Acc(left.type))
        self.statements.append(Product(tuple(batch), rows, columns, depth, left.place, right.place, (out,)))
        return self.lying(array)

    def into(self, place: Place, value: Value) -> None:
        """Stores a value at a place of its shape."""
        self.statements.append(Map(value.shape, (Out(place, value.expr),)))
