"""Operators that go where computed numbers say, and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from carpool.kernels.resident.builder import Builder, Refused, Value
from carpool.kernels.resident.loops import (
    Along,
    Const,
    Draw,
    Expr,
    Gather,
    Load,
    Map,
    Out,
    Place,
    Scatter,
    Shape,
    contiguous,
    whole,
)
from carpool.kernels.resident.lower.pointwise import number, pointwise
from carpool.kernels.resident.lower.products import windows
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import op


def _where(builder: Builder, value: Value) -> Place:
    """Where a value lies, so that others can go there."""
    place = builder.stored(value).place
    assert place is not None
    return place


def _wrapped(index: Value, bound: int) -> Expr:
    """Numbers below zero count from the end."""
    own = number(index, "i8").expr
    return op("where", op("lt", own, Const("i8", 0)), op("add", own, Const("i8", bound)), own)


@lowers("aten.embedding.default")
def embedding(call: Call, weight: Value, indices: Value, *_: Any) -> Value:
    place = _where(call.builder, weight)
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
    made = _zeros(call)
    place = _where(call.builder, made)
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
    place = _where(call.builder, input)
    space, own, along = _indexed(call.builder, input.shape, place, indices)
    if space != call.shape:
        raise Refused("indices with dimensions between them")
    return Value(call.shape, Gather(call.type, Place(place.array, place.offset, own), along))


def _indexed(
    builder: Builder, shape: Shape, place: Place, indices: Sequence[Value | None]
) -> tuple[Shape, Shape, tuple[Along, ...]]:
    """The space that indices make of a shape, the strides of what is not indexed, and how far the indices go."""
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
    if not accumulate:
        raise Refused("values that replace others at computed places")
    made = _copy(call, input)
    place = _where(call.builder, made)
    space, own, along = _indexed(call.builder, call.shape, place, indices)
    value = call.builder.stored(call.builder.expanded(number(values, call.type), space))
    call.builder.statements.append(Scatter(space, replace(place, strides=own), along, value.expr))
    return made


@lowers("aten.index_select.default")
def index_select(call: Call, input: Value, dim: int, indices: Value) -> Value:
    dim %= len(input.shape)
    return index(call, input, [*[None] * dim, indices])


@lowers("aten.gather.default")
def gather(call: Call, input: Value, dim: int, indices: Value, **_: Any) -> Value:
    place = _where(call.builder, input)
    dim %= max(1, len(input.shape))
    strides = tuple(0 if d == dim else stride for d, stride in enumerate(place.strides))
    along = Along(number(indices, "i8").expr, place.strides[dim], input.shape[dim])
    return Value(call.shape, Gather(call.type, Place(place.array, place.offset, strides), (along,)))


@lowers("aten.scatter.value", "aten.scatter.src")
def scatter(call: Call, input: Value, dim: int, indices: Value, given: Any, **_: Any) -> Value:
    """Into one place of each line: what is not there stays."""
    dim %= max(1, len(input.shape))
    if indices.shape[dim] != 1:
        raise Refused("several values for one line")
    return _put(call, input, dim, indices, given, lambda old, new: new)


@lowers("aten.scatter_add.default")
def scatter_add(call: Call, input: Value, dim: int, indices: Value, given: Value) -> Value:
    dim %= max(1, len(input.shape))
    made = _copy(call, input)
    place = _where(call.builder, made)
    strides = tuple(0 if d == dim else stride for d, stride in enumerate(place.strides))
    along = Along(number(indices, "i8").expr, place.strides[dim], call.shape[dim])
    source = given
    for d, size in enumerate(indices.shape):
        source = call.builder.sliced(source, d, 0, size)
    value = call.builder.stored(source)
    call.builder.statements.append(
        Scatter(indices.shape, replace(place, strides=strides), (along,), value.expr)
    )
    return made


def _put(call: Call, input: Value, dim: int, indices: Value, given: Any, into: Any) -> Value:
    """Where a line's own index is, the given value; elsewhere what was there."""
    builder, shape = call.builder, call.shape
    if tuple(s for d, s in enumerate(indices.shape) if d != dim) != tuple(
        s for d, s in enumerate(shape) if d != dim
    ):
        raise Refused("indices of some lines only")
    from carpool.kernels.resident.loops import Iota

    counted = Iota("i8", 0, tuple(1 if d == dim else 0 for d in range(len(shape))))
    own = builder.expanded(builder.stored(number(indices, "i8")), shape)
    new = builder.expanded(number(given, call.type), shape)
    hit = op("eq", own.expr, counted)
    return Value(shape, op("where", hit, into(input.expr, new.expr), number(input, call.type).expr))


def _zeros(call: Call) -> Value:
    array = call.builder.array(call.type, call.shape)
    call.builder.into(
        whole(array), Value(call.shape, Const(call.type, 0.0 if call.type in ("f4", "f8") else 0))
    )
    return call.builder.lying(array)


def _copy(call: Call, input: Value) -> Value:
    """An array of its own, to be added to."""
    array = call.builder.array(call.type, call.shape)
    call.builder.statements.append(
        Map(
            call.shape, (Out(whole(array), call.builder.expanded(number(input, call.type), call.shape).expr),)
        )
    )
    return Value(call.shape, Load(call.type, whole(array)))


# Losses that look up the target's score


@lowers("aten.nll_loss_forward.default")
def nll_loss(
    call: Call, scores: Value, target: Value, weight: Value | None, reduction: int, ignored: int
) -> tuple[Value, Value]:
    builder, kind = call.builder, scores.type
    picked, share = _picked(call, scores, target, weight, ignored)
    losses = Value(picked.shape, op("neg", op("mul", picked.expr, share.expr)))
    total = builder.reduced("sum", share, list(range(len(share.shape))))
    if reduction == 0:
        return losses, builder.constant((), 0.0, kind)
    summed = builder.reduced("sum", losses, list(range(len(losses.shape))))
    if reduction == 1:
        summed = Value((), op("div", summed.expr, total.expr))
    return summed, total


def _picked(
    call: Call, scores: Value, target: Value, weight: Value | None, ignored: int
) -> tuple[Value, Value]:
    """Each sample's score at its target, and what the sample counts."""
    builder, kind = call.builder, scores.type
    place = _where(builder, scores)
    dim = len(scores.shape) - 1 if len(scores.shape) < 2 else 1
    if len(scores.shape) > 2:
        raise Refused("targets for each place of an image")
    own = number(target, "i8")
    is_ignored = op("eq", own.expr, Const("i8", ignored))
    safe = op("where", is_ignored, Const("i8", 0), own.expr)
    strides = place.strides[:dim]
    along = Along(safe, place.strides[dim], scores.shape[dim])
    found = Gather(kind, Place(place.array, place.offset, strides), (along,))
    counts: Expr = Const(kind, 1.0)
    if weight is not None:
        at = _where(builder, weight)
        lead = (0,) * len(target.shape)
        counts = Gather(
            kind, Place(at.array, at.offset, lead), (Along(safe, at.strides[0], weight.shape[0]),)
        )
    share = op("where", is_ignored, Const(kind, 0.0), counts)
    return builder.stored(Value(target.shape, found)), builder.stored(Value(target.shape, share))


@lowers("aten.nll_loss_backward.default")
def nll_loss_backward(
    call: Call, grad: Value, scores: Value, target: Value, weight: Value | None, reduction: int, ignored: int,
    total: Value,
) -> Value:  # fmt: skip
    from carpool.kernels.resident.loops import Iota

    builder, kind = call.builder, call.type
    own = builder.stored(number(target, "i8"))
    is_ignored = op("eq", own.expr, Const("i8", ignored))
    safe = op("where", is_ignored, Const("i8", 0), own.expr)
    counts: Expr = Const(kind, 1.0)
    if weight is not None:
        at = _where(builder, weight)
        lead = (0,) * len(target.shape)
        counts = Gather(
            kind, Place(at.array, at.offset, lead), (Along(safe, at.strides[0], weight.shape[0]),)
        )
    share = Value(target.shape, op("where", is_ignored, Const(kind, 0.0), counts))
    scale = builder.expanded(grad, target.shape)
    each = Value(target.shape, op("neg", op("mul", scale.expr, share.expr)))
    if reduction == 1:
        each = pointwise(builder, target.shape, lambda e, t: op("div", e, t), each, total)
    builder.stored(each)
    if not target.shape:
        wide, hit_at = builder.expanded(each, call.shape), builder.expanded(own, call.shape)
        counted = Iota("i8", 0, (1,))
    else:
        wide = builder.expanded(builder.unsqueezed(each, 1), call.shape)
        hit_at = builder.expanded(builder.unsqueezed(own, 1), call.shape)
        counted = Iota("i8", 0, (0, 1))
    hit = op("eq", hit_at.expr, counted)
    return Value(call.shape, op("where", hit, wide.expr, Const(kind, 0.0)))


# Pools


def _all(given: Sequence[int], dims: int) -> list[int]:
    given = list(given)
    return given * dims if len(given) == 1 else given


@lowers("aten.max_pool2d_with_indices.default")
def max_pool(
    call: Call, image: Value, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[Value, Value]:  # fmt: skip
    values, places = call.made
    kernel = _all(kernel, 2)
    stride, padding, dilation = _all(stride or kernel, 2), _all(padding, 2), _all(dilation, 2)
    if (
        any(padding)
        or _reaches(image.shape[2:], values.shape[2:], kernel, stride, dilation)
        or len(image.shape) != 4
    ):
        raise Refused("a pool that reaches over the edge")
    builder = call.builder
    builder.stored(image)
    seen = windows(call, image, kernel, tuple(values.shape[2:]), stride, dilation)
    flat = builder.reduced("argmax", _joined(builder, seen, kernel), [4])
    top = builder.reduced("max", seen, [4, 5])
    _ = places
    return top, _position(builder, flat, image.shape, kernel, stride, dilation)


def _joined(builder: Builder, seen: Value, kernel: Sequence[int]) -> Value:
    return builder.reshaped(seen, (*seen.shape[:4], kernel[0] * kernel[1]))


def _reaches(
    size: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    return any(
        (o - 1) * s + (k - 1) * d + 1 > n
        for n, o, k, s, d in zip(size, out, kernel, stride, dilation, strict=True)
    )


def _position(
    builder: Builder,
    flat: Value,
    shape: Shape,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Value:
    """Where in its image the largest pixel of a window is, from where in its window."""
    from carpool.kernels.resident.loops import Iota

    builder.stored(flat)
    row = op("floordiv", flat.expr, Const("i8", kernel[1]))
    column = op("sub", flat.expr, op("mul", row, Const("i8", kernel[1])))
    top = Iota("i8", 0, (0, 0, stride[0], 0))
    left = Iota("i8", 0, (0, 0, 0, stride[1]))
    y = op("add", top, op("mul", row, Const("i8", dilation[0])))
    x = op("add", left, op("mul", column, Const("i8", dilation[1])))
    return builder.stored(Value(flat.shape, op("add", op("mul", y, Const("i8", shape[3])), x)))


@lowers("aten.max_pool2d_with_indices_backward.default")
def max_pool_backward(
    call: Call, grad: Value, image: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    places: Value,
) -> Value:  # fmt: skip
    builder = call.builder
    made = _zeros(call)
    place = _where(builder, made)
    height, width = call.shape[2:]
    along = Along(number(places, "i8").expr, 1, height * width)
    strides = (*place.strides[:2], 0, 0)
    builder.statements.append(
        Scatter(grad.shape, replace(place, strides=strides), (along,), builder.stored(grad).expr)
    )
    return made


@lowers("aten.avg_pool2d.default")
def avg_pool(
    call: Call, image: Value, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor: int | None = None,
) -> Value:  # fmt: skip
    kernel = _all(kernel, 2)
    stride = _all(stride or kernel, 2)
    if any(padding) or ceil_mode or len(image.shape) != 4:
        raise Refused("a pool that reaches over the edge")
    builder = call.builder
    builder.stored(image)
    seen = windows(call, image, kernel, call.shape[2:], stride, (1, 1))
    summed = builder.reduced("sum", seen, [4, 5])
    count = float(divisor or prod(kernel))
    return Value(summed.shape, op("div", summed.expr, Const(call.type, count)))


@lowers("aten.avg_pool2d_backward.default")
def avg_pool_backward(
    call: Call, grad: Value, image: Value, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool, count_include_pad: bool, divisor: int | None,
) -> Value:  # fmt: skip
    kernel = _all(kernel, 2)
    stride = _all(stride or kernel, 2)
    if any(padding) or ceil_mode:
        raise Refused("a pool that reaches over the edge")
    builder = call.builder
    builder.stored(grad)
    made = _zeros(call)
    strides = contiguous(call.shape)
    share = op("div", grad.expr, Const(call.type, float(divisor or prod(kernel))))
    array = _where(builder, made).array
    for y in range(kernel[0]):
        for x in range(kernel[1]):
            own = Place(
                array,
                y * strides[2] + x * strides[3],
                (strides[0], strides[1], stride[0] * strides[2], stride[1] * strides[3]),
            )
            builder.into(own, Value(grad.shape, op("add", Load(call.type, own), share)))
    return made


# Random numbers


@lowers("carpool.uniform.default")
def uniform(call: Call, seed: Value, step: Value, number_of_call: int, count: int, device: Any) -> Value:
    if seed.shape or step.shape:
        raise Refused("random numbers of several members")
    array = call.builder.array("f4", (count,))
    own = (number(seed, "i8").expr, number(step, "i8").expr)
    call.builder.statements.append(Draw(array, count, *own, number_of_call))
    return call.builder.lying(array)
