"""Convolutions in a stack: each member's own, one after another in one launch.

Torch's batching rule makes one grouped convolution of all members, for which cuDNN has slow kernels only. A few members one by one
keep the fast ones, and inside a captured launch a kernel more costs next to nothing. Wider stacks, and those on a CPU, stay with
torch's rule.

Tensor cores read channels innermost. Left to itself the compiler lays out a step's forward convolutions so and not its backward ones, and
cuDNN turns every tensor around: 1.0 of the 6.7 ms that a ResNet-18's step took on an H200. A single member's tensors are laid out once, where
they reach the first convolution, and what comes between convolutions keeps them so. Of several members they would be turned around at each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

MOST_UNROLLED = 4  # members; a pair of small CNNs steps twice as fast on an H200, eight 1.2 times as slowly
_FEW_CHANNELS = 64  # with no more in any layer, tensors stay as they are: the compiler's own rule

_KIND = "cuda"
_aten = torch.ops.aten


class Form(Enum):
    """How a stack computes its convolutions. As it was opened: members that leave later change no bit."""

    TOGETHER = "one grouped convolution of all members: torch's rule"
    APART = "each member's own by itself"
    PLAIN = "the only member's own, by torch"
    INNERMOST = "the only member's own, with channels innermost in memory where tensor cores compute it"


def form(members: int, weights: Iterable[Sequence[int]], turns: bool = True) -> Form:
    """The form of a stack of so many members whose weights have these shapes; `turns`: the model takes tensors that are turned around.

    >>> [form(members, [(128, 64, 3, 3), (10, 512)]).name for members in (1, 2, 8)]
    ['INNERMOST', 'APART', 'TOGETHER']
    """
    if members > 1:
        return Form.APART if members <= MOST_UNROLLED else Form.TOGETHER
    widest = max((max(shape[:2]) for shape in weights if len(shape) == 4), default=0)
    return Form.INNERMOST if turns and widest > _FEW_CHANNELS else Form.PLAIN


_form: ContextVar[Form] = ContextVar("form", default=Form.TOGETHER)


@contextmanager
def formed(how: Form) -> Iterator[None]:
    """Inside, convolutions are traced in this form."""
    token = _form.set(how)
    try:
        yield
    finally:
        _form.reset(token)


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
        if isinstance(padding, str):
            padding = _padded(padding, weight.shape[2:], _each(dilation, dims))
        if padding is None or input.dim() != dims + 2:
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


def _padded(word: str, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...] | None:
    """What the word means on each side; None where the sides differ."""
    reach = [each * (size - 1) for each, size in zip(dilation, kernel, strict=True)]
    if word == "valid":
        return (0,) * len(reach)
    return None if any(each % 2 for each in reach) else tuple(each // 2 for each in reach)


def _run(input: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Any:
    kind, form = input.device.type, _form.get()
    if kind != _KIND or form is Form.PLAIN:
        return NotImplemented
    if torch.is_autocast_enabled(kind):
        input, weight = _cast(input, kind), _cast(weight, kind)
        bias = None if bias is None else _cast(bias, kind)
    if form is Form.INNERMOST and not _reads_innermost(weight, how[-1]):
        return NotImplemented
    return _Convolve.apply(_laid_out(form, input), _laid_out(form, weight), bias, (form, how))


def _cast(tensor: Tensor, kind: str) -> Tensor:
    """As autocast does it, which leaves float64 alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(kind))


def _laid_out(form: Form, tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if form is Form.INNERMOST else tensor


def _reads_innermost(weight: Tensor, groups: int) -> bool:
    """Whether a convolution is faster with channels innermost; in groups of several it is far slower."""
    in_groups = groups > 1 and weight.shape[1] > 1
    return weight.dim() == 4 and not in_groups and _by_tensor_cores(weight.dtype, weight.device)


def _by_tensor_cores(dtype: torch.dtype, device: torch.device) -> bool:
    oldest = 7 if dtype == torch.float16 else 8
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < oldest:
        return False
    if dtype == torch.float32:
        return attrgetter("cudnn.conv.fp32_precision")(torch.backends) == "tf32"
    return dtype in (torch.bfloat16, torch.float16)


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
        if args[3][0] is not Form.APART:
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
        form, options = how
        sizes = None if bias_sizes is None else list(bias_sizes)
        made = _aten.convolution_backward(_laid_out(form, grad), input, weight, sizes, *options, list(wanted))
        return tuple(grad.new_empty(0) if part is None else part for part in made)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        if args[4][0] is not Form.APART:
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
