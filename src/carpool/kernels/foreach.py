"""Torch's functions over lists of tensors, one tensor at a time: vmap has rules for these, and a factor may be a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_NAMES = ("abs", "add", "div", "maximum", "mul", "neg", "sqrt", "sub")


def _each(name: str, in_place: bool) -> Callable[..., Any]:
    def over(tensors: Sequence[Tensor], *others: Any, alpha: Any = None, **options: Any) -> list[Tensor]:
        made = []
        for position, tensor in enumerate(tensors):
            own = [other[position] if isinstance(other, list | tuple) else other for other in others]
            made.append(_one(name, in_place, tensor, own, alpha))
        return made

    return over


def _one(name: str, in_place: bool, tensor: Tensor, others: list[Any], alpha: Any) -> Tensor:
    options = {} if alpha is None else {"alpha": alpha}
    if isinstance(alpha, Tensor):  # torch would read it on the host
        others, options = [others[0] * alpha], {}
    if name == "maximum":
        made = torch.maximum(tensor, *others)
        return tensor.copy_(made) if in_place else made
    return getattr(tensor, f"{name}_" if in_place else name)(*others, **options)


def _where_scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Only where the factor is a tensor: otherwise torch's own function takes all the tensors in one launch."""

    def over(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options) if isinstance(options.get("alpha"), Tensor) else NotImplemented

    return over


def _torchs(name: str, in_place: bool) -> Any:
    return getattr(torch, f"_foreach_{name}{'_' if in_place else ''}")


EACH = {_torchs(name, place): _each(name, place) for name in _NAMES for place in (False, True)}
SCALED = {
    _torchs(name, place): _where_scaled(_each(name, place))
    for name in ("add", "sub")
    for place in (False, True)
}
