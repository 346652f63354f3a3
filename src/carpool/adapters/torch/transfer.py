"""From the host to a device that is busy: through pinned memory, so that the host never waits for what is enqueued before."""

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
