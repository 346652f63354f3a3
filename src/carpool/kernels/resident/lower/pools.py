"""Pools: the largest or the mean of windows, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any

from carpool.kernels.resident.builder import Builder, Refused, Value
from carpool.kernels.resident.loops import Along, Const, Expr, Iota, Scatter
from carpool.kernels.resident.lower.pointwise import number, pointwise
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.lower.windows import Windows, each
from carpool.kernels.resident.operations import cast, op


def _dims(call: Call) -> int:
    """Of the images that an operator is for: its name says so."""
    return 3 if "pool3d" in str(call.node.target) else 2


def _windows(
    image: Value, out: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int] = (1,),
) -> Windows:  # fmt: skip
    dims = len(out)
    sides = [each(given, dims) for given in (kernel, stride or kernel, padding, dilation)]
    return Windows(image.shape[-dims:], out, *sides)


# The largest


@lowers("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(
    call: Call, image: Value, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[Value, Value]:  # fmt: skip
    out = tuple(call.made[0].shape)[-_dims(call) :]
    return _largest(call.builder, image, _windows(image, out, kernel, stride, padding, dilation))


@lowers("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(call: Call, image: Value, out: Sequence[int]) -> tuple[Value, Value]:
    kernel = _alike(image.shape[-len(out) :], out)
    return _largest(call.builder, image, _windows(image, out, kernel, kernel, (0,)))


def _alike(size: Sequence[int], out: Sequence[int]) -> tuple[int, ...]:
    """The windows of an adaptive pool, where all of them are alike."""
    if any(whole % parts for whole, parts in zip(size, out, strict=True)):
        raise Refused("windows that are not alike")
    return tuple(whole // parts for whole, parts in zip(size, out, strict=True))


def _largest(builder: Builder, image: Value, windows: Windows) -> tuple[Value, Value]:
    """The largest of each window, and where it is in its image."""
    seen = windows.over(builder, windows.padded(builder, image, -inf))
    lead = len(image.shape) - windows.dims
    inside = range(lead + windows.dims, lead + 2 * windows.dims)
    flat = builder.reshaped(seen, (*seen.shape[: lead + windows.dims], prod(windows.kernel)))
    found = builder.reduced("argmax", flat, [-1])
    return builder.reduced("max", seen, list(inside)), _position(builder, found, windows)


def _position(builder: Builder, found: Value, windows: Windows) -> Value:
    """Where in its image a place in each window is."""
    lead, rest = len(found.shape) - windows.dims, builder.stored(found).expr
    total: Expr = Const("i8", 0)
    size = 1
    for dim in reversed(range(windows.dims)):
        kernel = Const("i8", windows.kernel[dim])
        further = op("floordiv", rest, kernel)
        inside = op("sub", rest, op("mul", further, kernel))
        strides = tuple(windows.stride[dim] if d == lead + dim else 0 for d in range(len(found.shape)))
        start = Iota("i8", -windows.padding[dim], strides)
        own = op("add", start, op("mul", inside, Const("i8", windows.dilation[dim])))
        # A window that holds nothing but minus infinity has its largest in the padding.
        own = op("min", op("max", own, Const("i8", 0)), Const("i8", windows.size[dim] - 1))
        total, rest = op("add", total, op("mul", own, Const("i8", size))), further
        size *= windows.size[dim]
    return builder.stored(Value(found.shape, total))


@lowers(
    "aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default",
    "aten.adaptive_max_pool2d_backward.default", "aten.adaptive_max_pool3d_backward.default",
)  # fmt: skip
def max_pool_backward(call: Call, grad: Value, image: Value, *rest: Any) -> Value:
    """Each window's gradient to where its largest was."""
    builder, dims, places = call.builder, _dims(call), rest[-1]
    made = builder.filled(call.type, call.shape, 0.0)
    place = builder.place(made)
    along = Along(number(places, "i8").expr, 1, prod(call.shape[-dims:]))
    strides = (*place.strides[:-dims], *[0] * dims)
    builder.statements.append(
        Scatter(grad.shape, replace(place, strides=strides), (along,), builder.stored(grad).expr)
    )
    return made


# The mean


@lowers("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(
    call: Call, image: Value, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor: int | None = None,
) -> Value:  # fmt: skip
    builder, dims = call.builder, _dims(call)
    windows = _windows(image, call.shape[-dims:], kernel, stride, padding)
    seen = windows.over(builder, windows.padded(builder, image))
    summed = builder.reduced("sum", seen, range(-dims, 0))
    return _divided(builder, summed, windows, count_include_pad, divisor)


@lowers("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default")
def avg_pool_backward(
    call: Call, grad: Value, image: Value, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], ceil_mode: bool, count_include_pad: bool, divisor: int | None,
) -> Value:  # fmt: skip
    builder, dims = call.builder, _dims(call)
    windows = _windows(image, grad.shape[-dims:], kernel, stride, padding)
    return _spread(builder, _divided(builder, grad, windows, count_include_pad, divisor), windows)


def _spread(builder: Builder, shares: Value, windows: Windows) -> Value:
    """An image in which each pixel is the sum of its windows' shares."""
    dims, lead = windows.dims, len(shares.shape) - windows.dims
    wide = shares
    if windows.are_beside:
        for dim in range(dims):
            wide = builder.unsqueezed(wide, lead + 2 * dim + 1)
        sides = [side for pair in zip(windows.out, windows.kernel, strict=True) for side in pair]
        wide = builder.expanded(wide, (*shares.shape[:lead], *sides))
        return builder.reshaped(wide, (*shares.shape[:lead], *windows.size))
    builder.stored(shares)
    for _ in range(dims):
        wide = builder.unsqueezed(wide, -1)
    return windows.added(builder, builder.expanded(wide, (*shares.shape, *windows.kernel)))


def _divided(
    builder: Builder, summed: Value, windows: Windows, with_padding: bool, divisor: int | None
) -> Value:
    """By how many pixels a window has, with its padding or without."""
    kind = summed.type
    if divisor or windows.is_inside:
        return Value(
            summed.shape, op("div", summed.expr, Const(kind, float(divisor or prod(windows.kernel))))
        )
    count: Expr = Const("i8", 1)
    lead = len(summed.shape) - windows.dims
    for dim in range(windows.dims):
        pad = windows.padding[dim] if with_padding else 0
        size, kernel = windows.size[dim], windows.kernel[dim]
        strides = tuple(windows.stride[dim] if d == lead + dim else 0 for d in range(len(summed.shape)))
        start = Iota("i8", -windows.padding[dim], strides)
        end = op("min", op("add", start, Const("i8", kernel)), Const("i8", size + pad))
        count = op("mul", count, op("sub", end, op("max", start, Const("i8", -pad))))
    return Value(summed.shape, op("div", summed.expr, cast(count, kind)))


# The mean of as many windows as are wanted


@lowers("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(call: Call, image: Value, out: Sequence[int]) -> Value:
    """Dimension after dimension, window after window."""
    builder, made = call.builder, image
    lead = len(image.shape) - len(out)
    for dim, parts in enumerate(out):
        size = made.shape[lead + dim]
        shape = (*made.shape[: lead + dim], parts, *made.shape[lead + dim + 1 :])
        array = builder.lying(builder.array(call.type, shape))
        builder.stored(made)
        for part in range(parts):
            first, last = part * size // parts, -(-(part + 1) * size // parts)
            summed = builder.reduced(
                "sum", builder.sliced(made, lead + dim, first, last - first), [lead + dim]
            )
            mean = op("div", summed.expr, Const(call.type, float(last - first)))
            there = builder.place(builder.selected(array, lead + dim, part))
            builder.into(there, Value(summed.shape, mean))
        made = array
    return made


@lowers("aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default")
def adaptive_avg_pool_backward(call: Call, grad: Value, image: Value) -> Value:
    builder, made, dims = call.builder, grad, _dims(call)
    lead = len(image.shape) - dims
    for dim in range(lead, lead + dims):
        parts, size = made.shape[dim], image.shape[dim]
        shape = (*made.shape[:dim], size, *made.shape[dim + 1 :])
        total = builder.filled(call.type, shape, 0.0)
        builder.stored(made)
        for part in range(parts):
            first, last = part * size // parts, -(-(part + 1) * size // parts)
            share = op("div", builder.sliced(made, dim, part, 1).expr, Const(call.type, float(last - first)))
            there = builder.sliced(total, dim, first, last - first)
            wide = builder.expanded(Value((*shape[:dim], 1, *shape[dim + 1 :]), share), there.shape)
            both = pointwise(builder, there.shape, lambda a, b: op("add", a, b), there, wide)
            builder.into(builder.place(there), both)
        made = total
    return made
