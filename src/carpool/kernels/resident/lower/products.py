"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carpool.kernels.resident.builder import Refused, Value
from carpool.kernels.resident.loops import Const, Load, Place, contiguous, whole
from carpool.kernels.resident.lower.pointwise import pointwise
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import cast, op


@lowers("aten.mm.default", "aten.bmm.default")
def product(call: Call, left: Value, right: Value) -> Value:
    return call.builder.product(left, right)


@lowers("aten.addmm.default", "aten.baddbmm.default")
def added(call: Call, bias: Value, left: Value, right: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    made = call.builder.product(left, right)
    b, a = (cast(Const("f8", float(given)), call.type) for given in (beta, alpha))
    return pointwise(
        call.builder,
        call.shape,
        lambda x, y: op("add", op("mul", x, b), op("mul", y, a)),
        bias,
        made,
    )


@lowers("aten.mv.default")
def by_vector(call: Call, matrix: Value, vector: Value) -> Value:
    made = call.builder.product(matrix, call.builder.unsqueezed(vector, 1))
    return call.builder.squeezed(made, 1)


@lowers("aten.dot.default")
def dot(call: Call, left: Value, right: Value) -> Value:
    both = pointwise(call.builder, left.shape, lambda a, b: op("mul", a, b), left, right)
    return call.builder.reduced("sum", both, [0])


# Convolutions: the windows of a padded image are a view of it, so a convolution is a product with that view.


def _all(given: Sequence[int], dims: int) -> tuple[int, ...]:
    given = list(given)
    return tuple(given * dims if len(given) == 1 else given)


def _padded(call: Call, image: Value, padding: Sequence[int]) -> Value:
    """The image with zeros around it."""
    if not any(padding):
        return image
    lead = image.shape[:2]
    shape = (*lead, *(size + 2 * pad for size, pad in zip(image.shape[2:], padding, strict=True)))
    array, strides = call.builder.array(image.type, shape), contiguous(shape)
    call.builder.into(whole(array), Value(shape, Const(image.type, 0.0)))
    at = sum(pad * stride for pad, stride in zip(padding, strides[2:], strict=True))
    call.builder.into(Place(array, at, strides), image)
    return call.builder.lying(array)


def windows(
    call: Call,
    image: Value,
    kernel: Sequence[int],
    out: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Value:
    """[samples, channels, *out, *kernel] of an image, as a view."""

    def move(at: int, strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        own = strides[2:]
        steps = tuple(step * way for step, way in zip(stride, own, strict=True))
        inside = tuple(far * way for far, way in zip(dilation, own, strict=True))
        return at, (*strides[:2], *steps, *inside)

    return call.builder.view(image, (*image.shape[:2], *out, *kernel), move)


def _columns(
    call: Call, image: Value, groups: int, kernel: Sequence[int], out: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Value:  # fmt: skip
    """[groups, samples * out, channels of a group * kernel], packed."""
    builder, dims = call.builder, len(kernel)
    seen = windows(call, _padded(call, image, padding), kernel, out, stride, dilation)
    samples, channels = image.shape[:2]
    split = builder.reshaped(builder.stored(seen), (samples, groups, channels // groups, *out, *kernel)) \
        if groups > 1 else builder.unsqueezed(seen, 1)  # fmt: skip
    order = [1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims)]
    turned = builder.packed(builder.permuted(split, order))
    rows, depth = samples * _count(out), channels // groups * _count(kernel)
    return builder.reshaped(turned, (groups, rows, depth))


def _count(sizes: Sequence[int]) -> int:
    made = 1
    for size in sizes:
        made *= size
    return made


def _by_group(call: Call, outer: Value, groups: int) -> Value:
    """[samples, channels, *out] as [groups, samples * out, channels of a group]."""
    builder = call.builder
    samples, channels, *out = outer.shape
    split = builder.reshaped(outer, (samples, groups, channels // groups, _count(out)))
    turned = builder.packed(builder.permuted(split, (1, 0, 3, 2)))
    return builder.reshaped(turned, (groups, samples * _count(out), channels // groups))


@lowers("aten.convolution.default")
def convolution(
    call: Call, image: Value, weight: Value, bias: Value | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Value:  # fmt: skip
    if transposed:
        raise Refused("a transposed convolution")
    builder, dims = call.builder, len(image.shape) - 2
    stride, padding, dilation = (_all(given, dims) for given in (stride, padding, dilation))
    kernel, out = weight.shape[2:], call.shape[2:]
    columns = _columns(call, image, groups, kernel, out, stride, padding, dilation)
    filters = builder.reshaped(weight, (groups, weight.shape[0] // groups, columns.shape[2]))
    made = builder.product(columns, builder.permuted(filters, (0, 2, 1)))
    split = builder.reshaped(made, (groups, image.shape[0], _count(out), weight.shape[0] // groups))
    turned = builder.permuted(split, (1, 0, 3, 2))
    result = builder.reshaped(builder.packed(turned), call.shape)
    if bias is None:
        return result
    wide = builder.reshaped(bias, (1, weight.shape[0], *[1] * dims))
    return pointwise(builder, call.shape, lambda x, b: op("add", x, b), result, wide)


@lowers("aten.convolution_backward.default")
def convolution_backward(
    call: Call, grad: Value, image: Value, weight: Value, bias_sizes: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    wanted: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:  # fmt: skip
    if transposed:
        raise Refused("a transposed convolution")
    builder, dims = call.builder, len(image.shape) - 2
    stride, padding, dilation = (_all(given, dims) for given in (stride, padding, dilation))
    kernel, out = weight.shape[2:], grad.shape[2:]
    made: list[Value | None] = [None, None, None]
    outer = _by_group(call, grad, groups)
    filters = builder.reshaped(weight, (groups, weight.shape[0] // groups, _count(weight.shape[1:])))
    if wanted[0]:
        seen = builder.product(outer, filters)
        made[0] = _gathered(call, seen, image, groups, kernel, out, stride, padding, dilation)
    if wanted[1]:
        columns = _columns(call, image, groups, kernel, out, stride, padding, dilation)
        slope = builder.product(builder.permuted(outer, (0, 2, 1)), columns)
        made[1] = builder.reshaped(slope, weight.shape)
    if wanted[2]:
        made[2] = builder.reduced("sum", grad, [0, *range(2, 2 + dims)])
    return made[0], made[1], made[2]


def _gathered(
    call: Call, seen: Value, image: Value, groups: int, kernel: Sequence[int], out: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Value:  # fmt: skip
    """What the windows say of each pixel, added up window by window."""
    builder, dims = call.builder, len(kernel)
    samples, channels = image.shape[:2]
    shape = (samples, channels, *(size + 2 * pad for size, pad in zip(image.shape[2:], padding, strict=True)))
    array, strides = builder.array(image.type, shape), contiguous(shape)
    builder.into(whole(array), Value(shape, Const(image.type, 0.0)))
    split = builder.reshaped(seen, (groups, samples, *out, channels // groups, *kernel))
    order = [1, 0, 2 + dims, *range(2, 2 + dims), *range(3 + dims, 3 + 2 * dims)]
    turned = builder.permuted(split, order)
    for number in range(_count(kernel)):
        inside, rest = [], number
        for size in reversed(kernel):
            inside.insert(0, rest % size)
            rest //= size
        part = turned
        for place in inside:
            part = builder.selected(part, 3 + dims, place)
        part = builder.reshaped(part, (samples, channels, *out)) if groups == 1 else builder.reshaped(
            builder.packed(part), (samples, channels, *out)
        )  # fmt: skip
        at = sum(place * far * way for place, far, way in zip(inside, dilation, strides[2:], strict=True))
        own = Place(
            array, at, (*strides[:2], *(step * way for step, way in zip(stride, strides[2:], strict=True)))
        )
        before = Load(image.type, own)
        builder.into(own, Value(part.shape, op("add", before, part.expr)))
    inner = builder.lying(array)
    for dim, pad in enumerate(padding):
        inner = builder.sliced(inner, 2 + dim, pad, image.shape[2 + dim])
    return inner
