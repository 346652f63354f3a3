"""A function of one member, for every row of a stack: by vmap, or, where there is one row only, as it is.

Of one row, tensors keep the shapes that the model gave them. The compiler knows those best: it lays out images with channels
innermost only where they have four dimensions, and multiplies matrices by kernels that add a bias on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from carpool.kernels.refusal import Unkeyed


def by_row(function: Callable[..., Any], in_dims: Sequence[int | None], single: bool) -> Callable[..., Any]:
    """The function of every row of those arguments whose dimension is 0, the others being the same for all."""

    if not single:
        return vmap(function, in_dims=tuple(in_dims))

    def run(*args: Any) -> Any:
        own = [arg if dim is None else _row(arg) for arg, dim in zip(args, in_dims, strict=True)]
        with _Keyed():
            made = function(*own)
        return pytree.tree_map(lambda part: part.unsqueeze(0), made)

    return run


def _row(nest: Any) -> Any:
    return pytree.tree_map(lambda tensor: tensor.select(0, 0), nest)


class _Keyed(TorchDispatchMode):
    """Refuses what vmap refuses as well: random numbers of torch's own generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs):
            raise Unkeyed(f"{func} draws from torch's generator")
        return func(*args, **kwargs)


def _drops_nothing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator is random only by its dropout, which is off: attention's kernels, say."""
    known = func._schema.arguments
    given = {one.name: one.default_value for one in known if one.has_default_value()}
    given |= dict(zip((one.name for one in known), args, strict=False)) | kwargs
    return any(given[name] == 0.0 for name in ("dropout", "dropout_p") if name in given)
