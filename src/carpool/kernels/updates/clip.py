"""Clipping of stacked gradients, each member by its own norm."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(grad: Tensor, limit: Tensor) -> Tensor:
    """Each row's gradient scaled so that its norm is at most its limit, as `clip_grad_norm_` does."""
    norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    return grad * torch.clamp(limit / (norm + 1e-6), max=1.0)
