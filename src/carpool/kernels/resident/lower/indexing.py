"""Operators that go where computed numbers say, and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from carpool.kernels.resident.builder import Builder, Refused, Value
from carpool.kernels.resident.loops import (
    Along,
    Const,
    Expr,
    Gather,
    Place,
    Scatter,
    Shape,
)
from carpool.kernels.resident.lower.pointwise import number, pointwise
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import op


def _wrapped(index: Value, bound: int) -> Expr:
    """Numbers below zero count from the end."""
    own = number(index, "i8").expr
    return op("where", op("lt", own, Const("i8", 0)), op("add", own, Const("i8", bound)), own)


@lowers("aten.embedding.default")
def embedding(call: Call, weight: Value, indices: Value, *_: Any) -> Value:
    place = call.builder.place(weight)
    index = call.builder.expanded(call.builder.unsqueezed(indices, -1), call.shape)
    along = Along(number(index, "i8").expr, place.strides[0], weight.shape[0])
    strides = (*[0] * len(indices.shape), place.strides[1])
    return Value(call.shape, Gather(call.type, Place(place.array, place.offset, strides), (along,)))


@lowers("aten.embedding_dense_backward.default")
def embedding_backward(
    call: Call, grad: Value, indices: Value, count: int, padding: int, by_frequency: bool
) -> Value:
    if by_frequency:
        raise Refused("gradients scaled by frequency")
    made = call.builder.filled(call.type, call.shape, 0)
    place = call.builder.place(made)
    index = call.builder.expanded(call.builder.unsqueezed(indices, -1), grad.shape)
    value = grad
    if padding >= 0:
        zero = Const(call.type, 0.0)
        value = pointwise(
            call.builder,
            grad.shape,
            lambda g, i: op("where", op("eq", i, Const("i8", padding)), zero, g),
            grad,
            number(index, "i8"),
        )
    along = Along(number(index, "i8").expr, place.strides[0], count)
    strides = (*[0] * len(indices.shape), 1)
    call.builder.statements.append(
        Scatter(grad.shape, Place(place.array, 0, strides), (along,), call.builder.stored(value).expr)
    )
    return made


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call, input: Value, indices: Sequence[Value | None]) -> Value:
    place = call.builder.place(input)
    space, own, along = _indexed(call.builder, input.shape, place, indices)
    if space != call.shape:
        raise Refused("indices with dimensions between them")
    return Value(call.shape, Gather(call.type, Place(place.array, place.offset, own), along))


def _indexed(
    builder: Builder, shape: Shape, place: Place, indices: Sequence[Value | None]
) -> tuple[Shape, Shape, tuple[Along, ...]]:
    """The space that indices make of a shape, the strides of the rest, and how far the indices go."""
    given = {dim: one for dim, one in enumerate(indices) if one is not None}
    if any(one.type == "u1" for one in given.values()):
        raise Refused("a mask of unknown length")
    dims = sorted(given)
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise Refused("indices with dimensions between them")
    broadcast = _broadcast([one.shape for one in given.values()])
    first = dims[0]
    rest = [dim for dim in range(len(shape)) if dim not in given]
    space = (*shape[:first], *broadcast, *shape[dims[-1] + 1 :])
    strides = [place.strides[dim] for dim in rest]
    own = (*strides[:first], *[0] * len(broadcast), *strides[first:])
    along = []
    for dim, one in given.items():
        wide = builder.expanded(one, broadcast)
        for _ in range(len(space) - first - len(broadcast)):
            wide = builder.unsqueezed(wide, -1)
        wide = builder.expanded(wide, space)
        along.append(Along(_wrapped(wide, shape[dim]), place.strides[dim], shape[dim]))
    return space, own, tuple(along)


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    wide = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*wide, strict=True))


@lowers("aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default")
def index_put(
    call: Call, input: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    given = [one for one in indices if one is not None]
    if len(given) == 1 and given[0].type == "u1" and not accumulate and values.size == 1:
        return _where_true(call, input, indices, values)
    made = call.builder.copied(_wide(call, input))
    place = call.builder.place(made)
    space, own, along = _indexed(call.builder, call.shape, place, indices)
    value = call.builder.stored(call.builder.expanded(number(values, call.type), space))
    call.builder.statements.append(Scatter(space, replace(place, strides=own), along, value.expr, accumulate))
    return made


def _where_true(call: Call, input: Value, indices: Sequence[Value | None], values: Value) -> Value:
    """One value wherever a mask says so."""
    builder = call.builder
    mask = next(one for one in indices if one is not None)
    for _ in range(len(call.shape) - len(mask.shape) - indices.index(mask)):
        mask = builder.unsqueezed(mask, -1)
    new = builder.reshaped(number(values, call.type), ())
    return pointwise(builder, call.shape, lambda c, a, b: op("where", c, a, b), mask, new, _wide(call, input))


@lowers("aten.index_select.default")
def index_select(call: Call, input: Value, dim: int, indices: Value) -> Value:
    dim %= len(input.shape)
    return index(call, input, [*[None] * dim, indices])


@lowers("aten.gather.default")
def gather(call: Call, input: Value, dim: int, indices: Value, **_: Any) -> Value:
    place = call.builder.place(input)
    dim %= max(1, len(input.shape))
    strides = tuple(0 if d == dim else stride for d, stride in enumerate(place.strides))
    along = Along(number(indices, "i8").expr, place.strides[dim], input.shape[dim])
    return Value(call.shape, Gather(call.type, Place(place.array, place.offset, strides), (along,)))


@lowers("aten.scatter.value", "aten.scatter.src")
def scatter(call: Call, input: Value, dim: int, indices: Value, given: Any, **_: Any) -> Value:
    return _put_along(call, input, dim, indices, given, adds=False)


@lowers("aten.scatter_add.default")
def scatter_add(call: Call, input: Value, dim: int, indices: Value, given: Value) -> Value:
    return _put_along(call, input, dim, indices, given, adds=True)


def _put_along(call: Call, input: Value, dim: int, indices: Value, given: Any, adds: bool) -> Value:
    """Into each line along a dimension, where its indices say."""
    builder = call.builder
    dim %= max(1, len(input.shape))
    made = builder.copied(_wide(call, input))
    place = builder.place(made)
    strides = tuple(0 if d == dim else stride for d, stride in enumerate(place.strides))
    along = Along(number(indices, "i8").expr, place.strides[dim], call.shape[dim])
    source = number(given, call.type)
    for d, size in enumerate(indices.shape if source.shape else ()):
        source = builder.sliced(source, d, 0, size)
    value = builder.stored(builder.expanded(source, indices.shape))
    builder.statements.append(
        Scatter(indices.shape, replace(place, strides=strides), (along,), value.expr, adds)
    )
    return made


def _wide(call: Call, input: Value) -> Value:
    """Of the type and the shape that the operator gives."""
    return call.builder.expanded(number(input, call.type), call.shape)
