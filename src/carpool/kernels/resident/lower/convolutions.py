"""Convolutions: windows of a padded image are a view of it, so a convolution is a product with that.

In every matrix the places of the images lie side by side, as they do in the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from carpool.kernels.resident.builder import Builder, Value
from carpool.kernels.resident.lower.pointwise import pointwise
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.lower.windows import Windows, each
from carpool.kernels.resident.operations import op


def _columns(builder: Builder, image: Value, groups: int, windows: Windows) -> Value:
    """[groups, channels of a group * kernel, samples * out], packed."""
    dims, kernel, out = windows.dims, windows.kernel, windows.out
    seen = windows.over(builder, windows.padded(builder, image))
    samples, channels = image.shape[:2]
    split = builder.reshaped(seen, (samples, groups, channels // groups, *out, *kernel))
    order = [1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims)]
    turned = builder.packed(builder.permuted(split, order))
    return builder.reshaped(turned, (groups, channels // groups * prod(kernel), samples * prod(out)))


def _by_group(builder: Builder, image: Value, groups: int) -> Value:
    """[samples, channels, *places] as [groups, channels of a group, samples * places]."""
    samples, channels, *places = image.shape
    split = builder.reshaped(image, (samples, groups, channels // groups, prod(places)))
    turned = builder.packed(builder.permuted(split, (1, 2, 0, 3)))
    return builder.reshaped(turned, (groups, channels // groups, samples * prod(places)))


def _as_image(builder: Builder, made: Value, shape: Sequence[int]) -> Value:
    """[groups, channels of a group, samples * places] as [samples, channels, *places]."""
    groups, channels, _ = made.shape
    split = builder.reshaped(made, (groups, channels, shape[0], prod(shape[2:])))
    return builder.reshaped(builder.packed(builder.permuted(split, (2, 0, 1, 3))), shape)


def _seen(builder: Builder, made: Value, samples: int, windows: Windows) -> Value:
    """[groups, channels of a group * kernel, samples * out] as [samples, channels, *out, *kernel]."""
    groups, dims = made.shape[0], windows.dims
    channels = made.shape[1] // prod(windows.kernel)
    split = builder.reshaped(made, (groups, channels, *windows.kernel, samples, *windows.out))
    order = [2 + dims, 0, 1, *range(3 + dims, 3 + 2 * dims), *range(2, 2 + dims)]
    turned = builder.permuted(split, order)
    shape = (samples, groups * channels, *windows.out, *windows.kernel)
    return builder.reshaped(turned if groups == 1 else builder.packed(turned), shape)


def _filters(builder: Builder, weight: Value, groups: int) -> Value:
    """[groups, filters of a group, what each filter sees]."""
    return builder.reshaped(weight, (groups, weight.shape[0] // groups, prod(weight.shape[1:])))


def _turned(builder: Builder, matrices: Value) -> Value:
    """Each group's matrix, the other way round."""
    return builder.permuted(matrices, (0, 2, 1))


@lowers("aten.convolution.default")
def convolution(
    call: Call, image: Value, weight: Value, bias: Value | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
    groups: int,
) -> Value:  # fmt: skip
    """Transposed, it is the gradient of a convolution for its image."""
    builder, dims = call.builder, len(image.shape) - 2
    stride, padding, dilation = (each(given, dims) for given in (stride, padding, dilation))
    large, small = (call.shape, image.shape) if transposed else (image.shape, call.shape)
    windows = Windows(large[2:], small[2:], weight.shape[2:], stride, padding, dilation)
    filters = _filters(builder, weight, groups)
    if transposed:
        made = builder.product(_turned(builder, filters), _by_group(builder, image, groups))
        result = windows.added(builder, _seen(builder, made, image.shape[0], windows))
    else:
        columns = _columns(builder, image, groups, windows)
        made = builder.product(filters, columns)
        result = _as_image(builder, made, call.shape)
    if bias is None:
        return result
    wide = builder.reshaped(bias, (1, call.shape[1], *[1] * dims))
    return pointwise(builder, call.shape, lambda x, b: op("add", x, b), result, wide)


@lowers("aten.convolution_backward.default")
def convolution_backward(
    call: Call, grad: Value, image: Value, weight: Value, bias_sizes: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
    groups: int, wanted: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:  # fmt: skip
    builder, dims = call.builder, len(image.shape) - 2
    stride, padding, dilation = (each(given, dims) for given in (stride, padding, dilation))
    large, small = (grad, image) if transposed else (image, grad)
    windows = Windows(large.shape[2:], small.shape[2:], weight.shape[2:], stride, padding, dilation)
    filters, inner = _filters(builder, weight, groups), _by_group(builder, small, groups)
    made: list[Value | None] = [None, None, None]
    columns = _columns(builder, large, groups, windows) if transposed or wanted[1] else None
    if wanted[0] and transposed:
        assert columns is not None
        slope = builder.product(filters, columns)
        made[0] = _as_image(builder, slope, image.shape)
    elif wanted[0]:
        seen = builder.product(_turned(builder, filters), inner)
        made[0] = windows.added(builder, _seen(builder, seen, image.shape[0], windows))
    if wanted[1]:
        assert columns is not None
        slope = builder.product(inner, _turned(builder, columns))
        made[1] = builder.reshaped(slope, weight.shape)
    if wanted[2]:
        made[2] = builder.reduced("sum", grad, [0, *range(2, 2 + dims)])
    return made[0], made[1], made[2]
