"""How precisely the user lets torch multiply, and what a job's own `precision=` makes of it.

Global settings are read, and changed only for a step that is compared (`strictly`). Torch has an older set of getters and a newer one;
the older raise once a user has set one of the newer, so only those are read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_strict: ContextVar[bool] = ContextVar("strict", default=False)
_changing = threading.Lock()
PLACES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")


def settings() -> tuple[str, ...]:
    """The precision of float32 products, place by place."""
    return tuple(_read(place) for place in PLACES)


def multiplies_in_tf32() -> bool:
    return _read("cuda.matmul") == "tf32"


def convolves_in_tf32() -> bool:
    """True unless the user said otherwise: it is torch's own default on a GPU."""
    return _read("cudnn.conv") == "tf32"


def recurs_in_tf32() -> bool:
    """True unless the user said otherwise, likewise."""
    return _read("cudnn.rnn") == "tf32"


def computing_in(word: str, device: str) -> AbstractContextManager[object]:
    """What a job's `precision=` puts around its forward pass and loss on this type of device."""
    lowered = computes_in_16_bits(word, device) and not _strict.get()
    if word == "inherit" and not lowered:
        return nullcontext()
    kind = torch.get_autocast_dtype(device) if word == "inherit" else torch.bfloat16
    # Never from a cache: a cast of the weights that is kept while autocast lasts is stale after the first update.
    return torch.autocast(device, kind, enabled=lowered, cache_enabled=False)


def untouched(word: str, device: str) -> AbstractContextManager[object]:
    """Autocast off for all of a step but what `computing_in` surrounds, where a job says its precision itself."""
    return nullcontext() if word == "inherit" else torch.autocast(device, enabled=False)


def computes_in_16_bits(word: str, device: str) -> bool:
    """Whether a job of this `precision=` computes in a 16-bit type on this type of device, as things are now."""
    return word == "bf16" or (word == "inherit" and torch.is_autocast_enabled(device))


@contextmanager
def strictly() -> Iterator[None]:
    """Inside, nothing is computed in fewer bits than the weights have.

    From the outside in: what inherits a setting follows by itself, and inherits it again afterwards.
    """
    before: list[tuple[Any, str]] = []
    with _changing, torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        token = _strict.set(True)
        try:
            places: list[Any] = [torch.backends, *map(_place, ("cudnn", "mkldnn", *PLACES))]
            for place in places:
                if (word := place.fp32_precision) != "ieee":
                    before.append((place, word))
                    place.fp32_precision = "ieee"
            yield
        finally:
            _strict.reset(token)
            for place, word in reversed(before):
                place.fp32_precision = word


_NORMS = frozenset({F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm})


class WideNorms(TorchFunctionMode):
    """On a CPU, the norm of a 16-bit input computed in float32 and rounded to 16 bits after that.

    The kernels of a job alone do just that; those that vmap leads to there take no input narrower than the weights.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NORMS or not _is_narrower(args[0], (*args[1:], *kwargs.values())):
            return func(*args, **kwargs)
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)


def _is_narrower(input: torch.Tensor, others: tuple[Any, ...]) -> bool:
    narrow = input.device.type == "cpu" and input.dtype in (torch.bfloat16, torch.float16)
    return narrow and any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in others)


def _read(place: str) -> str:
    return _place(place).fp32_precision


def _place(name: str) -> Any:
    return attrgetter(name)(torch.backends)
