"""How torch says that a device is full."""

from __future__ import annotations

import torch

from carpool import collector

_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_full(error: BaseException) -> bool:
    """Libraries beneath torch have no error class of their own: they are known by their words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def free() -> None:
    """Gives back what garbage and the allocator's cache hold."""
    collector.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
