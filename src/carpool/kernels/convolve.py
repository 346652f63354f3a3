"""Convolutions with channels innermost in memory, which is how tensor cores read them.

Left to itself the compiler lays out a step's forward convolutions so and not its backward ones, and cuDNN turns every tensor around: 1.0 of
the 6.7 ms that a ResNet-18's step took on an H200. Here tensors are laid out where they reach the first convolution, and gradients where
they reach the last one; what comes between convolutions keeps them so. That takes tensors of a model's own shapes: members of a stack
that are traced one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_FEW_CHANNELS = 64  # with no more in any layer, tensors stay as they are: the compiler's own rule

_KIND = "cuda"
_wanted: ContextVar[bool] = ContextVar("channels innermost", default=False)


@contextmanager
def innermost(wanted: bool) -> Iterator[None]:
    """Inside, if that is wanted, convolutions that tensor cores compute are traced so."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def gains(weights: Iterable[Sequence[int]]) -> bool:
    """Whether a model whose weights have these shapes is faster so.

    >>> gains([(128, 64, 3, 3), (10, 512)]), gains([(64, 3, 3, 3), (10, 512)])
    (True, False)
    """
    return max((max(shape[:2]) for shape in weights if len(shape) == 4), default=0) > _FEW_CHANNELS


def laid_out(convolve: Callable[..., Tensor]) -> Callable[..., Any]:
    """What `F.conv2d` or `F.conv_transpose2d` computes, on tensors that are laid out."""

    def run(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
        groups = args[4] if len(args) > 4 else options.get("groups", 1)
        if not _wanted.get() or not _reads_innermost(input, weight, groups):
            return NotImplemented
        with innermost(False):  # torch's own, and not this one again
            made = convolve(_turned(input), _turned(weight), *args, **options)
        return _Back.apply(made)

    return run


def _reads_innermost(input: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether a convolution is faster so; in groups of several channels it is far slower."""
    if input.device.type != _KIND or input.dim() != 4 or weight.dim() != 4:
        return False
    return not (groups > 1 and weight.shape[1] > 1) and _by_tensor_cores(_computed_in(weight), weight.device)


def _computed_in(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    lowers = weight.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if lowers else weight.dtype


def _by_tensor_cores(dtype: torch.dtype, device: torch.device) -> bool:
    oldest = 7 if dtype == torch.float16 else 8
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < oldest:
        return False
    if dtype == torch.float32:
        return attrgetter("cudnn.conv.fp32_precision")(torch.backends) == "tf32"
    return dtype in (torch.bfloat16, torch.float16)


def _turned(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


class _Back(torch.autograd.Function):
    """What goes in; the gradient on its way back is laid out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(made: Tensor) -> Tensor:
        return made.view_as(made)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _turned(grad)
