"""How much a step computes, and whether one job's step keeps a GPU busy by itself.

Such jobs gain nothing from a stack. Compiled and captured by hand on an H200 (132 multiprocessors), eight ResNet-18s of 142 GFLOP forward
step 1.2 times as fast one after another as stacked, and sixteen small CNNs of 2 GFLOP 1.5 times as fast stacked. The limit lies between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_BUSY_FLOPS = 2.5e8  # of a forward pass, for each multiprocessor of the GPU
_FORWARD = frozenset({F.conv1d, F.conv2d, F.conv3d})
_TRANSPOSED = frozenset({F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d})


class Convolved(TorchFunctionMode):
    """Counts the floating-point operations of the convolutions inside; tensors need no contents.

    Only of those that are trained through: what a stack computes once for all its members, a frozen trunk say, is no reason against it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in _FORWARD or func in _TRANSPOSED:
            input = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if input.requires_grad or weight.requires_grad:
                met = input if func in _TRANSPOSED else made
                self.flops += 2 * met.numel() * weight[0].numel()
        return made


def busy(flops: int, device: str) -> str:
    """Why a GPU has no room for a second job of so many operations in convolutions, in words; empty where it has."""
    if not device.startswith("cuda"):
        return ""
    return told(flops, torch.cuda.get_device_properties(device).multi_processor_count)


def told(flops: int, processors: int) -> str:
    """The same for a GPU of so many multiprocessors.

    >>> told(142_000_000_000, processors=132), told(2_000_000_000, processors=132)
    ("one job's step keeps the GPU busy: 142 GFLOP in convolutions, forward", '')
    """
    if flops < _BUSY_FLOPS * processors:
        return ""
    return f"one job's step keeps the GPU busy: {flops / 1e9:.0f} GFLOP in convolutions, forward"
