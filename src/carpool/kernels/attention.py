"""Scaled dot-product attention in a stack: members folded into the batch of torch's own kernels, or written out.

The kernels have no batching rule for their gradient. Folding needs none: a member's heads attend among themselves,
just as another sample's do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `F.scaled_dot_product_attention` computes, for members of a stack."""
    if enable_gqa:
        key, value = _for_each_head(query, key, value)
    kernel = _kernel(query, key, value, attn_mask) if dropout_p == 0 else None
    if kernel is None:
        return written_out(query, key, value, attn_mask, dropout_p, is_causal, scale)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _Attend.apply(query, key, value, kernel, is_causal, factor)[0]


def _for_each_head(query: Tensor, *others: Tensor) -> list[Tensor]:
    """Keys and values as often as there are heads of queries."""
    return [t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in others]


def by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The same, always written out."""
    if enable_gqa:
        key, value = _for_each_head(query, key, value)
    return written_out(query, key, value, attn_mask, dropout_p, is_causal, scale)


def with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Alone: written out where dropout has to be keyed; else torch's own."""
    if dropout_p == 0:
        return NotImplemented
    return attend(query, key, value, attn_mask, dropout_p, *args, **kwargs)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """By the formula, with dropout on the weights. A query that may attend to nothing gives zeros, as torch's does."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        )
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    else:
        weights = torch.softmax(scores, -1)
    return F.dropout(weights, dropout_p, dropout_p > 0) @ value


def stated_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """In place of a look at a mask's values: whether the caller said that it is causal.

    Saying so changes which kernel runs, not what it computes: the mask is given either way.
    """
    return is_causal is True


class _Cpu:
    """The CPU's flash kernel. It takes any floating type and head size."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)

    @staticmethod
    def backward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sums: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, ...]:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, sums, 0.0, causal, scale=scale
        )


class _Cuda:
    """The memory-efficient kernel of CUDA. It takes 16- and 32-bit types and aligned heads."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        made = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return made[0], made[1]

    @staticmethod
    def backward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sums: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, ...]:
        unused = torch.zeros(
            (), dtype=torch.int64, device=query.device
        )  # the seed and offset of its own dropout
        every = [True, True, True, False]
        return _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, None, out, sums, unused, unused, 0.0, every, causal, scale=scale
        )[:3]


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> type[_Cpu] | type[_Cuda] | None:
    """The kernel that can run this; None where the formula has to."""
    heads = {t.shape[-1] for t in (query, key, value)}
    ordinary = query.dim() == key.dim() == value.dim() == 4 and len(heads) == 1
    if mask is not None or not ordinary or len({t.shape[:2] for t in (query, key, value)}) > 1:
        return None
    if min(query.numel(), key.numel()) == 0 or len({t.dtype for t in (query, key, value)}) > 1:
        return None
    if query.device.type == "cpu":
        return _Cpu
    aligned = query.dtype in _CUDA_ALIGNMENT and heads.pop() % _CUDA_ALIGNMENT[query.dtype] == 0
    return _Cuda if query.device.type == "cuda" and aligned else None


_CUDA_ALIGNMENT = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}


class _Attend(torch.autograd.Function):
    """A kernel with its gradient, and a batching rule that folds members into the batch."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, kernel: Any, causal: bool, scale: float) -> Any:
        return kernel.forward(query, key, value, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.how = inputs[3:]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_Gradient.apply(grads[0], *ctx.saved_tensors, *ctx.how), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _folded(_Attend, info.batch_size, in_dims, args)


class _Gradient(torch.autograd.Function):
    """The gradient of `_Attend`, likewise."""

    @staticmethod
    def forward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *how: Any
    ) -> Any:
        kernel, causal, scale = how
        return kernel.backward(grad, query, key, value, out, sums, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _folded(_Gradient, info.batch_size, in_dims, args)


def _folded(function: Any, members: int, dims: Any, args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Runs a function on members folded into the batch, and unfolds what it gives."""
    flat = [_fold(a, d, members) if isinstance(a, Tensor) else a for a, d in zip(args, dims, strict=True)]
    made = tuple(t.reshape(members, t.shape[0] // members, *t.shape[1:]) for t in function.apply(*flat))
    return made, (0,) * len(made)


def _fold(tensor: Tensor, dim: int | None, members: int) -> Tensor:
    wide = tensor.expand(members, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return wide.reshape(members * wide.shape[1], *wide.shape[2:])
