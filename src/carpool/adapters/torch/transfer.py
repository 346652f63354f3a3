"""Between the host and a device.

On the way there through pinned memory, so that the host never waits for what is enqueued before; on the way back into memory that is
there already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def sent(
    values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor, device: str | torch.device
) -> Tensor:
    """The values on the device. On a GPU they are on their way: whatever follows on the current stream finds them there."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)
    if torch.device(device).type != "cuda" or host.is_cuda:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


_LARGE_BYTES = 1 << 20


def landed(tensor: Tensor) -> Tensor:
    """A copy on the host.

    Of a large one every thread first touches its part of the new memory: the copy would, page by page on one thread, and take
    most of its time for that.
    """
    if not tensor.is_cuda:
        return tensor.detach().to("cpu", copy=True)
    host = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if host.nbytes >= _LARGE_BYTES:
        host.zero_()
    return host.copy_(tensor.detach())
