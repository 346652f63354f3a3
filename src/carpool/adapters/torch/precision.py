"""How precisely the user lets torch multiply: read, never changed.

Torch has an older set of getters and a newer one; the older raise once a user has set one of the newer, so only those
are read.
"""

from __future__ import annotations

from operator import attrgetter

import torch

_PLACES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")


def settings() -> tuple[str, ...]:
    """The precision of float32 products, place by place."""
    return tuple(_read(place) for place in _PLACES)


def multiplies_in_tf32() -> bool:
    return _read("cuda.matmul") == "tf32"


def convolves_in_tf32() -> bool:
    """True unless the user said otherwise: it is torch's own default on a GPU."""
    return _read("cudnn.conv") == "tf32"


def recurs_in_tf32() -> bool:
    """True unless the user said otherwise, likewise."""
    return _read("cudnn.rnn") == "tf32"


def _read(place: str) -> str:
    return attrgetter(f"{place}.fp32_precision")(torch.backends)
