"""Parametrized weights in a stack: weight, spectral and orthogonal ones by formulas that vmap can batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize(
    input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Any:
    """Spectral norm writes its vectors through `out=`, which no batching rule has."""
    return NotImplemented if out is None else out.copy_(F.normalize(input, p, dim, eps))


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`v` scaled so that its norm over all dimensions but `dim` is `g`; over all of them where `dim` is -1."""
    others = [place for place in range(v.dim()) if dim == -1 or place != dim % v.dim()]
    size = torch.linalg.vector_norm(v, 2, others, keepdim=dim != -1)
    return v * (g / size)


def householder_product(reflectors: Tensor, tau: Tensor) -> Tensor:
    """The first columns of a product of Householder reflections, which orthogonal weights are made of.

    By the product's compact form, I - V T Vᵀ, where T is the inverse of an upper triangular matrix: torch's own gradient
    changes a tensor in place that is not batched.
    """
    tall, wide = reflectors.shape[-2:]
    eye = torch.eye(tall, wide, dtype=reflectors.dtype, device=reflectors.device)
    v = reflectors.tril(-1) + eye
    inverse = (v.mT @ v).triu(1) + torch.diag_embed(1 / tau)
    return eye - v @ torch.linalg.solve_triangular(inverse, v.mT @ eye, upper=True)
