"""What a run computes in: TF32, bf16 under autocast, or strict float32, the same for every way."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

PRECISIONS = ("tf32", "bf16", "fp32")


def allow(precision: str) -> None:
    """Sets torch's own flags for a run. carpool itself never changes one."""
    strict = precision == "fp32"
    torch.set_float32_matmul_precision("highest" if strict else "high")
    torch.backends.cudnn.allow_tf32 = not strict


def computing_in(precision: str, device: str) -> AbstractContextManager[object]:
    """What the peers put around forward pass and loss; a captured step may not have its casts from a cache."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device, torch.bfloat16, cache_enabled=False)


def of_job(precision: str) -> str:
    """The same in the words of `carpool.Job(precision=)`.

    >>> of_job("bf16"), of_job("tf32"), of_job("fp32")
    ('bf16', 'inherit', 'inherit')
    """
    return "bf16" if precision == "bf16" else "inherit"
