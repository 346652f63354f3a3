"""What models are called with: arrays as tensors, cut into batches, and the outputs of batches joined again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from carpool.errors import DataError, sentence


@dataclass(frozen=True)
class Inputs:
    """A nest of tensors and plain values; a tuple or list is several arguments, a dict keywords, all else one argument."""

    leaves: tuple[Any, ...]
    nest: pytree.TreeSpec

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def length(self) -> int:
        """How many samples there are; 1 where no tensor has a first dimension."""
        return next((len(tensor) for tensor in self.tensors if tensor.dim()), 1)

    def batches(self, size: int | None) -> Iterator[Inputs]:
        """The inputs in batches of `size`; the last may be short. Plain values and 0-d tensors go to every batch."""
        if size is None or size >= self.length:
            yield self
            return
        for start in range(0, self.length, size):
            part = slice(start, start + size)
            cut = (leaf[part] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in self.leaves)
            yield Inputs(tuple(cut), self.nest)

    def on(self, device: torch.device | str) -> Inputs:
        """Copies on a device: a model that writes into its input writes into its own."""
        moved = (leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return Inputs(tuple(moved), self.nest)

    def holding(self, tensors: Sequence[Tensor]) -> Inputs:
        """The same nest with other tensors."""
        given = iter(tensors)
        return Inputs(
            tuple(next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves), self.nest
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and keywords of a call."""
        value = pytree.tree_unflatten(list(self.leaves), self.nest)
        if isinstance(value, dict):
            return (), value
        return (tuple(value) if isinstance(value, tuple | list) else (value,)), {}


def read_inputs(value: Any) -> Inputs:
    """The inputs as a user gives them, checked."""
    leaves, nest = pytree.tree_flatten(value)
    made = Inputs(
        tuple(torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves), nest
    )
    if not made.tensors:
        raise DataError(
            sentence(
                "a torch tensor or NumPy array as inputs, or a tuple or dict of them",
                type(value).__name__,
                "convert it, with torch.as_tensor say",
            )
        )
    lengths = [len(tensor) for tensor in made.tensors if tensor.dim()]
    if 0 in lengths:
        raise DataError(sentence("at least one sample as inputs", "0", "pass inputs that are not empty"))
    return made


def check_lengths(inputs: Inputs) -> None:
    """Raises where inputs cannot be cut into batches together."""
    lengths = [len(tensor) for tensor in inputs.tensors if tensor.dim()]
    if len(set(lengths)) > 1:
        raise DataError(
            sentence(
                "inputs of one length beside batch_size=", f"lengths {lengths}", "align them, or leave it out"
            )
        )


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of several batches as if there had been one."""
    if len(parts) == 1:
        return parts[0]
    flat = [pytree.tree_flatten(part) for part in parts]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined(column, sizes) for column in columns], flat[0][1])


def _joined(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(
        isinstance(leaf, Tensor) and leaf.shape[:1] == (n,) for leaf, n in zip(column, sizes, strict=True)
    ):
        return torch.cat(list(column))
    if not isinstance(column[0], Tensor) and all(leaf == column[0] for leaf in column):
        return column[0]
    shown = tuple(column[0].shape) if isinstance(column[0], Tensor) else repr(column[0])
    raise DataError(
        sentence(
            "outputs with a row for each sample, to join batches",
            f"{shown} from a batch of {sizes[0]}",
            "leave batch_size out",
        )
    )
