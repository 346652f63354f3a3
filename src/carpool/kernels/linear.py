"""Operators for which torch has no batching rule, written with ones that have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carpool.kernels.refusal import Unstackable


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    made = torch.einsum("...i,kij,...j->...k", input1, weight, input2)
    return made if bias is None else made + bias


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Bags of one length, summed or averaged."""
    plain = input.dim() == 2 and mode in ("sum", "mean") and padding_idx is None and max_norm is None
    if not plain or scale_grad_by_freq:
        raise Unstackable(
            "F.embedding_bag is stacked for 2-d inputs with mode 'sum' or 'mean', without max_norm, padding_idx and "
            "scale_grad_by_freq only"
        )
    found = F.embedding(input, weight)
    if per_sample_weights is not None:
        found = found * per_sample_weights[..., None]
    return found.sum(-2) if mode == "sum" else found.mean(-2)
