"""torch's own knobs for GPU memory, for a process that has imported it."""

from __future__ import annotations

import torch

from carpool.memory.policy import Policy


def initialised_gpus() -> int | None:
    """How many GPUs torch sees; None while CUDA is not initialised, and nothing is initialised to ask."""
    return torch.cuda.device_count() if torch.cuda.is_initialized() else None


def reserved_bytes() -> int:
    """What the allocator has taken from the current device."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


def limit_memory(policy: Policy) -> None:
    """Limits the current device. The variables limit every device, but an imported torch may have read them already.

    torch takes memory when it is needed in any case, so there is nothing to call for growth.
    """
    if (policy.limit.size_bytes is None and policy.limit.share is None) or not torch.cuda.is_available():
        return
    current = torch.cuda.current_device()
    fraction = policy.fraction(torch.cuda.get_device_properties(current).total_memory)
    assert fraction is not None
    torch.cuda.set_per_process_memory_fraction(fraction, current)
