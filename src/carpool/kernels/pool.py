"""Max pooling over windows that lie beside one another, on a CPU: one operator with two forms.

Torch's rule for a stack folds members into the batch. After a convolution, whose rule folds them into the channels, that turns every tensor
around in memory and back, and gradients are scattered one by one: two thirds of a step of small convolutional networks, compiled (docs/performance.md).
Here the operator takes tensors of any leading dimensions. As it runs uncompiled it is torch's kernel; the compiler is given slices and arithmetic
(`compiled_forms`), which it turns into loops along the channels, wherever those lie.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_PLACES = 16  # of a window: each is an operation when it is compiled


def beside(dims: int) -> Callable[..., Any]:
    """A max pooling over so many dimensions; windows that overlap, are padded or spread out are left to torch."""

    def pooled(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        window, step = _sizes(kernel_size, dims), _sizes(kernel_size if stride is None else stride, dims)
        is_beside = (
            step == window
            and len(window) == dims
            and min(window) > 0
            and _sizes(padding, dims) == [0] * dims
            and _sizes(dilation, dims) == [1] * dims
            and not (ceil_mode or return_indices)
        )
        if input.device.type != "cpu" or not is_beside or math.prod(window) > _MOST_PLACES:
            return NotImplemented
        if input.dim() not in (dims + 1, dims + 2) or not all(_counts(input.shape, window)):
            return NotImplemented
        return _Pooled.apply(input, window)[0]

    return pooled


MAX_POOLS = {F.max_pool1d: beside(1), F.max_pool2d: beside(2), F.max_pool3d: beside(3)}


def _sizes(given: Any, dims: int) -> list[int]:
    """A number for each dimension, as torch reads it: one stands for all."""
    each = list(given) if isinstance(given, Sequence) else [given]
    return each * dims if len(each) == 1 else each


def _counts(shape: Sequence[int], window: Sequence[int]) -> list[int]:
    """How many windows fit in each dimension."""
    return [size // side for size, side in zip(shape[-len(window) :], window, strict=True)]


def _parts(input: Tensor, window: Sequence[int]) -> Iterator[Tensor]:
    """For each place in a window, in torch's order, what all windows have there."""
    counts = _counts(input.shape, window)
    for place in itertools.product(*map(range, window)):
        cut = [
            slice(first, count * side, side) for first, count, side in zip(place, counts, window, strict=True)
        ]
        yield input[(..., *cut)]


class _Pooled(torch.autograd.Function):
    """The largest of each window, and its place; its gradient goes to the first place that holds it, as torch's does."""

    @staticmethod
    def forward(input: Tensor, window: list[int]) -> tuple[Tensor, Tensor]:
        return max_pool(input, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])
        ctx.window = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Gradient.apply(grads[0], *ctx.saved_tensors, ctx.window), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _reached(tangents[0], ctx.saved_tensors[0], ctx.window), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _Pooled.apply(*_leading(info.batch_size, in_dims, args)), (0, 0)


class _Gradient(torch.autograd.Function):
    """The gradient of `_Pooled`, and its own: what reaches the places that it came from."""

    @staticmethod
    def forward(grad: Tensor, input: Tensor, places: Tensor, window: list[int]) -> Tensor:
        return max_pool_gradient(grad, input, places, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(*inputs[1:3])
        ctx.window = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _reached(grads[0], ctx.saved_tensors[0], ctx.window), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Gradient.apply(tangents[0], *ctx.saved_tensors, ctx.window)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _Gradient.apply(*_leading(info.batch_size, in_dims, args)), 0


def _reached(values: Tensor, input: Tensor, window: Sequence[int]) -> Tensor:
    """Of other values, those at the place of each window's largest."""
    numbers = _numbers(input, window)
    chosen = (
        torch.where(numbers == number, part, torch.zeros_like(part))
        for number, part in enumerate(_parts(values, window))
    )
    return functools.reduce(torch.add, chosen)


def _leading(members: int, dims: Any, args: Any) -> list[Any]:
    """Members as one more leading dimension."""
    return [
        one
        if not isinstance(one, Tensor)
        else one.expand(members, *one.shape)
        if dim is None
        else one.movedim(dim, 0)
        for one, dim in zip(args, dims, strict=True)
    ]


# As they run uncompiled


@torch.library.custom_op("carpool::max_pool", mutates_args=(), device_types="cpu")
def max_pool(input: Tensor, window: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest of each window, and its place as torch tells it."""
    shape, sides = _flat(input.shape, window)
    largest, places = _kernels(sides)[0](input.reshape(shape), sides)
    made = _laid_out(largest, next(_parts(input, window)))
    return made, places.reshape(made.shape)


@torch.library.custom_op("carpool::max_pool_gradient", mutates_args=(), device_types="cpu")
def max_pool_gradient(grad: Tensor, input: Tensor, places: Tensor, window: Sequence[int]) -> Tensor:
    shape, sides = _flat(input.shape, window)
    windows, _ = _flat(grad.shape, window)
    zeros, ones = [0] * len(sides), [1] * len(sides)
    unread = input.new_empty(shape)  # it is asked for its shape alone
    backward = _kernels(sides)[1]
    made = backward(grad.reshape(windows), unread, sides, sides, zeros, ones, False, places.reshape(windows))
    return _laid_out(made, input)


def _kernels(sides: Sequence[int]) -> tuple[Any, Any]:
    aten = torch.ops.aten
    if len(sides) == 3:
        return aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward
    return aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward


def _flat(shape: Sequence[int], window: Sequence[int]) -> tuple[list[int], list[int]]:
    """A shape and a window as torch's kernels take them: leading dimensions as channels, then two or three."""
    dims = len(window)
    ones = [1] * (2 - dims)
    return [math.prod(shape[:-dims]), *ones, *shape[-dims:]], [*ones, *window]


def _laid_out(made: Tensor, like: Tensor) -> Tensor:
    """In another tensor's shape, its dimensions in memory in the order of that one's."""
    held = torch.empty_like(like)
    made = made.reshape(like.shape)
    return made if made.stride() == held.stride() else held.copy_(made)


# As they are traced


@max_pool.register_fake
def _(input: Tensor, window: Sequence[int]) -> tuple[Tensor, Tensor]:
    largest = torch.empty_like(next(_parts(input, window)))
    return largest, largest.new_empty(largest.shape, dtype=torch.int64)


@max_pool_gradient.register_fake
def _(grad: Tensor, input: Tensor, places: Tensor, window: Sequence[int]) -> Tensor:
    return torch.empty_like(input)


# As they are compiled


def compiled_forms() -> dict[Any, Callable[..., Any]]:
    """What the compiler is given in place of each operator."""
    ours = torch.ops.carpool
    return {ours.max_pool.default: _largest, ours.max_pool_gradient.default: _gradient}


def _largest(input: Tensor, window: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The places are read by nobody here, and so never made."""
    largest = _in_order_of(input, _maximum(list(_parts(input, window))))
    return largest, largest.new_zeros(largest.shape, dtype=torch.int64)


def _maximum(parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.maximum, parts[1:], parts[0].clone())


def _gradient(grad: Tensor, input: Tensor, places: Tensor, window: Sequence[int]) -> Tensor:
    """Each window's gradient at the first place of its largest, zero elsewhere."""
    dims, counts = len(window), _counts(input.shape, window)
    lead = input.shape[:-dims]
    apart = [*lead, *itertools.chain.from_iterable((count, 1) for count in counts)]
    numbers = torch.arange(math.prod(window), dtype=input.dtype, device=input.device)
    numbers = numbers.reshape([size for side in window for size in (side, 1)][:-1])
    wide = grad.reshape(apart)
    made = torch.where(_numbers(input, window).reshape(apart) == numbers, wide, torch.zeros_like(wide))
    made = made.reshape(*lead, *(count * side for count, side in zip(counts, window, strict=True)))
    missing = [size - side for size, side in zip(input.shape, made.shape, strict=True)][-dims:]
    if any(missing):
        made = F.pad(made, [side for size in reversed(missing) for side in (0, size)])
    return _in_order_of(input, made)


def _in_order_of(like: Tensor, made: Tensor) -> Tensor:
    """As the trace promised it: with its dimensions in memory in the order of another's."""
    order = sorted(range(like.dim()), key=lambda dim: -like.stride(dim))
    return made.permute(order).contiguous().permute([order.index(dim) for dim in range(like.dim())])


def _numbers(input: Tensor, window: Sequence[int]) -> Tensor:
    """The number of the first place of each window's largest.

    Counted in arithmetic: of masks the compiler makes no vectors where channels are few. And the largest is found again: as it was kept it may
    lie in another order in memory than the input.
    """
    parts = list(_parts(input, window))
    largest = _maximum(parts)
    found = torch.zeros_like(largest)
    for part in reversed(parts[:-1]):
        found = (part != largest).to(largest.dtype) * (found + 1)
    return found
