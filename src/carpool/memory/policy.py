"""How a process takes device memory, in each framework's own words. Pure: from a policy to environment variables.

Variables are read when a framework is imported or its devices start. What has to be called in the process, and when it is too late for
either, is in `enforce.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from carpool.memory.size import Limit

TORCH_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second is the older name. torch reads some settings from one and some from the other, so both say the same."""
CONTEXT_BYTES = 1 << 30
"""What a process takes on a GPU beside its framework's allocator: the CUDA context, loaded kernels, libraries' workspaces."""
_BETWEEN_SETTINGS = re.compile(r",(?![^\[]*\])")  # a list of values is in brackets, with commas of its own


@dataclass(frozen=True)
class Policy:
    """`growth`: take memory when it is needed. `limit`: never more than this, a share of the device or so many bytes."""

    limit: Limit = field(default_factory=Limit)
    growth: bool = True

    def fraction(self, total_bytes: int | None) -> float | None:
        """The limit as a share of a device of this size; None where there is no limit, or no device to take a share of.

        >>> Policy(Limit(size_bytes=25)).fraction(100), Policy(Limit(share=0.5)).fraction(None), Policy().fraction(100)
        (0.25, 0.5, None)
        """
        if self.limit.size_bytes is None:
            return self.limit.share
        return None if not total_bytes else min(1.0, self.limit.size_bytes / total_bytes)

    def limit_bytes(self, total_bytes: int) -> int | None:
        """The limit on a device of this size, in bytes."""
        share = self.fraction(total_bytes)
        return None if share is None else int(share * total_bytes)


def allocator_bytes(cap_bytes: int) -> int:
    """What the allocator of a process may take so that the whole process stays within its cap; of a small cap, half.

    >>> allocator_bytes(8 << 30) >> 20, allocator_bytes(1 << 30) >> 20
    (7168, 512)
    """
    return max(cap_bytes - CONTEXT_BYTES, cap_bytes // 2)


def variables(
    policy: Policy, total_bytes: int | None = None, present: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a process that has imported no framework yet; `present` is what it would have without us.

    TensorFlow has a variable for growth and none for a limit.

    >>> variables(Policy(Limit(share=0.25)))["XLA_PYTHON_CLIENT_MEM_FRACTION"]
    '0.250000'
    """
    present = present or {}
    fraction = policy.fraction(total_bytes)
    return {
        **_torch(policy, fraction, present),
        **_xla(policy, fraction, present),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true" if policy.growth else "false",
    }


def _torch(policy: Policy, fraction: float | None, present: Mapping[str, str]) -> dict[str, str]:
    theirs = next((present[name] for name in TORCH_NAMES if present.get(name)), "")
    settings = {"expandable_segments": "True"} if policy.growth else {}
    settings |= dict(_setting(part) for part in _BETWEEN_SETTINGS.split(theirs) if part.strip())
    if fraction is not None:
        settings["per_process_memory_fraction"] = _digits(fraction)
    text = ",".join(f"{key}:{value}" for key, value in settings.items())
    return dict.fromkeys(TORCH_NAMES, text) if text else {}


def _setting(part: str) -> tuple[str, str]:
    key, _, value = part.partition(":")
    return key.strip(), value.strip()


def _xla(policy: Policy, fraction: float | None, present: Mapping[str, str]) -> dict[str, str]:
    made = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false" if policy.growth else "true"}
    if fraction is not None:  # jaxlib refuses to start when both names are set
        newer = "XLA_CLIENT_MEM_FRACTION"
        made[newer if present.get(newer) else "XLA_PYTHON_CLIENT_MEM_FRACTION"] = _digits(fraction)
    return made


def _digits(fraction: float) -> str:
    """Rounded down: a limit is never exceeded by its rounding."""
    return f"{max(1, math.floor(fraction * 1e6)) / 1e6:.6f}"
