"""A function of one member, for every row of a stack: by vmap, or row by row.

By vmap a launch computes all rows. Row by row tensors keep the shapes that the model gave them, which the compiler and the libraries know best:
cuDNN has slow kernels only for the grouped convolution that vmap makes of the members' own, and the compiler lays out images with channels innermost
only where they have four dimensions. So a single row is taken as it is, and so are a few whose models convolve: inside a captured launch a kernel more
costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from carpool.kernels.refusal import Unkeyed

MOST_APART = 4  # rows; a pair of small CNNs steps twice as fast so on an H200, eight 1.2 times as slowly


def by_row(function: Callable[..., Any], in_dims: Sequence[int | None], apart: bool) -> Callable[..., Any]:
    """The function of every row of those arguments whose dimension is 0, the others being the same for all."""
    if not apart:
        return vmap(function, in_dims=tuple(in_dims))

    def run(*args: Any) -> Any:
        pairs = list(zip(args, in_dims, strict=True))
        rows = next(len(leaf) for arg, dim in pairs if dim == 0 for leaf in pytree.tree_leaves(arg))
        with _Keyed():
            made = [
                function(*(arg if dim is None else _row(arg, row) for arg, dim in pairs))
                for row in range(rows)
            ]
        if rows == 1:
            return pytree.tree_map(lambda part: part.unsqueeze(0), made[0])
        return pytree.tree_map(lambda *parts: torch.stack(parts), *made)

    return run


def is_apart(rows: int, convolves: bool, device: str) -> bool:
    """Whether so many rows are taken one by one.

    >>> is_apart(1, False, "cpu"), is_apart(2, True, "cuda:0"), is_apart(2, False, "cuda:0"), is_apart(8, True, "cuda:0")
    (True, True, False, False)
    """
    return rows == 1 or (convolves and rows <= MOST_APART and device.startswith("cuda"))


def _row(nest: Any, row: int) -> Any:
    return pytree.tree_map(lambda tensor: tensor.select(0, row), nest)


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
