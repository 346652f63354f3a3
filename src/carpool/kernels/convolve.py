"""Convolutions in a stack: each member's own, one after another in one launch.

Torch's batching rule makes one grouped convolution of all members, for which cuDNN has slow kernels only. A few members one by one
keep the fast ones, and inside a captured launch a kernel more costs next to nothing. Wider stacks, and those on a CPU, stay with
torch's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

MOST_UNROLLED = 4  # members; a pair of small CNNs steps twice as fast on an H200, eight 1.2 times as slowly

_KIND = "cuda"
_narrow: ContextVar[bool] = ContextVar("narrow", default=False)
_aten = torch.ops.aten


@contextmanager
def narrow(few: bool) -> Iterator[None]:
    """Whether the stack that is traced inside is narrow. It was when it was opened: members that leave later change no bit."""
    token = _narrow.set(few)
    try:
        yield
    finally:
        _narrow.reset(token)


def convolution(dims: int) -> Callable[..., Any]:
    """What `F.conv1d`, `F.conv2d` or `F.conv3d` computes, for members of a stack."""

    def convolve(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if isinstance(padding, str) or input.dim() != dims + 2:
            return NotImplemented
        sizes = [_each(value, dims) for value in (stride, padding, dilation)]
        return _run(input, weight, bias, (*sizes, False, (0,) * dims, groups))

    return convolve


def transposed(dims: int) -> Callable[..., Any]:
    """What `F.conv_transpose1d`, `2d` or `3d` computes, likewise."""

    def convolve(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if input.dim() != dims + 2:
            return NotImplemented
        sizes = [_each(value, dims) for value in (stride, padding, dilation)]
        return _run(input, weight, bias, (*sizes, True, _each(output_padding, dims), groups))

    return convolve


def _each(value: Any, dims: int) -> tuple[int, ...]:
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * dims if len(given) == 1 else given


def _run(input: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Any:
    kind = input.device.type
    if kind != _KIND:
        return NotImplemented
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        input, weight = input.to(lower), weight.to(lower)
        bias = None if bias is None else bias.to(lower)
    return _Convolve.apply(input, weight, bias, (_narrow.get(), how))


class _Convolve(torch.autograd.Function):
    """A convolution whose batching rule runs the members one by one."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        return _aten.convolution(input, weight, bias, *how[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, weight, bias, how = inputs
        ctx.save_for_backward(input, weight)
        ctx.how, ctx.bias_sizes = how, None if bias is None else tuple(bias.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        wanted = tuple(ctx.needs_input_grad[:3])
        made = _Gradient.apply(grad, *ctx.saved_tensors, ctx.bias_sizes, ctx.how, wanted)
        return *(part if want else None for part, want in zip(made, wanted, strict=True)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        if not args[3][0]:
            *tensors, how = args
            return torch.vmap(partial(_Convolve.forward, how=how), in_dims=tuple(in_dims[:3]))(*tensors), 0
        made = [_Convolve.apply(*own) for own in _members(info.batch_size, in_dims, args)]
        return torch.stack(made), 0


class _Gradient(torch.autograd.Function):
    """The gradient of `_Convolve`, likewise. A part that nobody wants is an empty tensor."""

    @staticmethod
    def forward(
        grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, how: tuple[Any, ...], wanted: Any
    ) -> Any:
        sizes = None if bias_sizes is None else list(bias_sizes)
        made = _aten.convolution_backward(grad, input, weight, sizes, *how[1], list(wanted))
        return tuple(grad.new_empty(0) if part is None else part for part in made)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        if not args[4][0]:
            tensors, (bias_sizes, how, wanted) = args[:3], args[3:]
            run = partial(_Gradient.forward, bias_sizes=bias_sizes, how=how, wanted=wanted)
            return torch.vmap(run, in_dims=tuple(in_dims[:3]))(*tensors), (0, 0, 0)
        made = [_Gradient.apply(*own) for own in _members(info.batch_size, in_dims, args)]
        return tuple(torch.stack(parts) for parts in zip(*made, strict=True)), (0, 0, 0)


def _members(members: int, dims: Sequence[Any], args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every member's own arguments."""
    parts = [
        arg.movedim(dim, 0).unbind(0) if isinstance(arg, Tensor) and dim is not None else [arg] * members
        for arg, dim in zip(args, dims, strict=True)
    ]
    return list(zip(*parts, strict=True))
