"""Operators that only look at their input differently, and those that put inputs together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from carpool.kernels.resident.builder import Refused, Value
from carpool.kernels.resident.loops import Const, Iota, Load, Place, contiguous
from carpool.kernels.resident.lower.pointwise import number
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import cast


@lowers("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
def view(call: Call, input: Value, shape: Sequence[int]) -> Value:
    return call.builder.reshaped(input, call.shape)


@lowers("aten.permute.default")
def permute(call: Call, input: Value, dims: Sequence[int]) -> Value:
    return call.builder.permuted(input, dims)


@lowers("aten.t.default")
def turned(call: Call, input: Value) -> Value:
    return call.builder.permuted(input, list(reversed(range(len(input.shape)))))


@lowers("aten.transpose.int")
def transpose(call: Call, input: Value, first: int, second: int) -> Value:
    dims = list(range(len(input.shape)))
    if dims:
        dims[first], dims[second] = dims[second], dims[first]
    return call.builder.permuted(input, dims)


@lowers("aten.expand.default", "aten.broadcast_to.default")
def expand(call: Call, input: Value, shape: Sequence[int], **_: Any) -> Value:
    return call.builder.expanded(input, call.shape)


@lowers("aten.unsqueeze.default")
def unsqueeze(call: Call, input: Value, dim: int) -> Value:
    return call.builder.unsqueezed(input, dim)


@lowers("aten.squeeze.dim", "aten.squeeze.default", "aten.squeeze.dims")
def squeeze(call: Call, input: Value, *_: Any) -> Value:
    return call.builder.reshaped(input, call.shape)


@lowers("aten.slice.Tensor")
def sliced(
    call: Call, input: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    size = input.shape[dim]
    first, _, _ = slice(start, end, step).indices(size)
    return call.builder.sliced(input, dim, first, call.shape[dim], step)


@lowers("aten.select.int")
def selected(call: Call, input: Value, dim: int, index: int) -> Value:
    return call.builder.selected(input, dim, index)


@lowers("aten.split.Tensor")
def split(call: Call, input: Value, size: int, dim: int = 0) -> list[Value]:
    return _parts(call, input, _sizes(input.shape[dim], size), dim)


@lowers("aten.split_with_sizes.default")
def split_with_sizes(call: Call, input: Value, sizes: Sequence[int], dim: int = 0) -> list[Value]:
    return _parts(call, input, list(sizes), dim)


@lowers("aten.unbind.int")
def unbind(call: Call, input: Value, dim: int = 0) -> list[Value]:
    return [call.builder.selected(input, dim, index) for index in range(input.shape[dim])]


def _sizes(length: int, size: int) -> list[int]:
    return [min(size, length - at) for at in range(0, length, size)]


def _parts(call: Call, input: Value, sizes: list[int], dim: int) -> list[Value]:
    call.builder.stored(input)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [call.builder.sliced(input, dim, at, size) for at, size in zip(starts, sizes, strict=True)]


@lowers("aten.flip.default")
def flip(call: Call, input: Value, dims: Sequence[int]) -> Value:
    value = input
    for dim in dims:
        size = value.shape[dim]
        if size > 1:
            value = call.builder.sliced(value, dim, size - 1, size, -1)
    return value


@lowers("aten.cat.default")
def cat(call: Call, inputs: Sequence[Value], dim: int = 0) -> Value:
    inputs = [part for part in inputs if part.shape != (0,)]
    made = call.builder.array(call.type, call.shape)
    dim %= len(call.shape)
    at, strides = 0, contiguous(call.shape)
    for part in inputs:
        call.builder.into(Place(made, at * strides[dim], strides), number(part, call.type))
        at += part.shape[dim]
    return call.builder.lying(made)


@lowers("aten.stack.default")
def stack(call: Call, inputs: Sequence[Value], dim: int = 0) -> Value:
    return cat(call, [call.builder.unsqueezed(part, dim) for part in inputs], dim)


@lowers("aten.slice_backward.default")
def slice_backward(
    call: Call, grad: Value, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Value:
    made = call.builder.filled(call.type, call.shape, 0)
    first, _, _ = slice(start, end, step).indices(sizes[dim])
    strides = contiguous(call.shape)
    own = (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
    call.builder.into(Place(made.place.array, first * strides[dim], own), grad)  # type: ignore[union-attr]
    return made


@lowers("aten.select_backward.default")
def select_backward(call: Call, grad: Value, sizes: Sequence[int], dim: int, index: int) -> Value:
    made, strides = call.builder.filled(call.type, call.shape, 0), contiguous(call.shape)
    dim %= len(call.shape)
    at = index % call.shape[dim]
    own = (*strides[:dim], *strides[dim + 1 :])
    call.builder.into(Place(made.place.array, at * strides[dim], own), grad)  # type: ignore[union-attr]
    return made


@lowers("aten.constant_pad_nd.default")
def padded(call: Call, input: Value, pad: Sequence[int], value: float = 0) -> Value:
    """Negative padding cuts off."""
    pads = [(0, 0)] * (len(call.shape) - len(pad) // 2)
    pads += [(pad[2 * i], pad[2 * i + 1]) for i in reversed(range(len(pad) // 2))]
    made = call.builder.filled(call.type, call.shape, _number(call, value))
    strides, at = contiguous(call.shape), 0
    for dim, (before, after) in enumerate(pads):
        if before < 0 or after < 0:
            size = input.shape[dim] + min(0, before) + min(0, after)
            input = call.builder.sliced(input, dim, max(0, -before), size)
        at += max(0, before) * strides[dim]
    call.builder.into(Place(made.place.array, at, strides), input)  # type: ignore[union-attr]
    return made


@lowers("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "prims.iota.default")
def arange(call: Call, *args: Any, **kwargs: Any) -> Value:
    start, step = 0, 1
    if "iota" in str(call.node.target):
        start, step = kwargs.get("start", 0), kwargs.get("step", 1)
    elif len(args) > 1:
        start, step = args[0], args[2] if len(args) > 2 else 1
    if int(start) != start or int(step) != step:
        counted = Value(call.shape, cast(Iota("i8", 0, (1,)), call.type))
        return _line(call, counted, float(start), float(step))
    return number(Value(call.shape, Iota("i8", int(start), (int(step),))), call.type)


def _line(call: Call, counted: Value, start: float, step: float) -> Value:
    from carpool.kernels.resident.operations import op

    first, by = (cast(Const("f8", given), call.type) for given in (start, step))
    return Value(call.shape, op("add", first, op("mul", by, counted.expr)))


@lowers("aten.as_strided.default")
def strided(
    call: Call, input: Value, shape: Sequence[int], strides: Sequence[int], offset: int | None = None
) -> Value:
    """A view by its strides, of what lies in memory as torch has it."""
    return _strided(call, call.builder.packed(input), shape, strides, offset)


def _strided(
    call: Call, packed: Value, shape: Sequence[int], strides: Sequence[int], offset: int | None
) -> Value:
    given = call.node.args[0].meta["val"]  # type: ignore[union-attr]
    if not given.is_contiguous() or given.storage_offset():
        raise Refused("strides of a view")
    place = call.builder.place(packed)
    own = Place(place.array, place.offset + (offset or 0), tuple(strides))
    return Value(shape, Load(packed.type, own))


@lowers("aten.as_strided_scatter.default")
def strided_scatter(
    call: Call,
    input: Value,
    part: Value,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int | None = None,
) -> Value:
    return _replaced(call, input, part, lambda made: _strided(call, made, shape, strides, offset))


@lowers("aten.diagonal.default")
def diagonal(call: Call, input: Value, offset: int = 0, first: int = 0, second: int = 1) -> Value:
    return _diagonal(call, input, offset, first, second)


def _diagonal(call: Call, input: Value, offset: int, first: int, second: int) -> Value:
    rank = len(input.shape)
    a, b = first % rank, second % rank
    rest = [dim for dim in range(rank) if dim not in (a, b)]
    rows, columns = input.shape[a] + min(0, offset), input.shape[b] - max(0, offset)
    shape = (*(input.shape[dim] for dim in rest), max(0, min(rows, columns)))

    def move(at: int, strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        begin = at + (offset * strides[b] if offset >= 0 else -offset * strides[a])
        return begin, (*(strides[dim] for dim in rest), strides[a] + strides[b])

    return call.builder.view(input, shape, move)


def _number(call: Call, value: float) -> float | int | bool:
    made = cast(Const("f8", value), call.type)
    assert isinstance(made, Const)
    return made.value


def _replaced(call: Call, input: Value, part: Value, view: Callable[[Value], Value]) -> Value:
    """A copy in which a view of it holds something else."""
    made = call.builder.copied(input)
    there = view(made)
    call.builder.into(call.builder.place(there), call.builder.expanded(number(part, call.type), there.shape))
    return made


@lowers("aten.slice_scatter.default")
def slice_scatter(
    call: Call, input: Value, part: Value, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Value:  # fmt: skip
    first, _, _ = slice(start, end, step).indices(call.shape[dim])
    return _replaced(
        call, input, part, lambda made: call.builder.sliced(made, dim, first, part.shape[dim], step)
    )


@lowers("aten.select_scatter.default")
def select_scatter(call: Call, input: Value, part: Value, dim: int, index: int) -> Value:
    return _replaced(call, input, part, lambda made: call.builder.selected(made, dim, index))


@lowers("aten.diagonal_scatter.default")
def diagonal_scatter(
    call: Call, input: Value, part: Value, offset: int = 0, first: int = 0, second: int = 1
) -> Value:
    return _replaced(call, input, part, lambda made: _diagonal(call, made, offset, first, second))


@lowers("aten.repeat.default")
def repeat(call: Call, input: Value, times: Sequence[int]) -> Value:
    builder, value = call.builder, input
    for _ in range(len(times) - len(value.shape)):
        value = builder.unsqueezed(value, 0)
    shape = value.shape
    for dim in reversed(range(len(shape))):
        value = builder.unsqueezed(value, dim)
    turned = [size for pair in zip(times, shape, strict=True) for size in pair]
    return builder.reshaped(builder.expanded(value, turned), call.shape)
