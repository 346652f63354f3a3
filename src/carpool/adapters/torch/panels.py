"""Panels: on a CPU the rows of a wide stack in parts that stay in the processor's cache.

A step of a wide stack passes over more memory than the cache holds, and so does the next one. Members are independent: a panel can take all
steps of a chunk before the next panel takes its first one, and nobody's bits change. The step is traced and compiled once, for a panel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from carpool.adapters.torch.layout import Layout
from carpool.adapters.torch.streams import Streamed
from carpool.memory.cache import cache_bytes
from carpool.planning.widths import num_panels

if TYPE_CHECKING:
    from carpool.adapters.torch.fuse import Known
    from carpool.adapters.torch.stacked import Recipe

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Panels:
    """So many panels of so many rows each."""

    count: int
    rows: int

    @property
    def width(self) -> int:
        """The rows of all panels: at least as many as the stack has members, since panels are alike."""
        return self.count * self.rows

    def of(self, row: int) -> int:
        """The panel that a row is in."""
        return row // self.rows

    def cut(self, tensors: Tensors) -> list[Tensors]:
        """A stack's tensors as each panel's step sees them: its own rows, and its own place in the chunk."""
        return [
            {name: self._part(name, tensor, number) for name, tensor in tensors.items()}
            for number in range(self.count)
        ]

    def _part(self, name: str, tensor: Tensor, number: int) -> Tensor:
        if name == "k":
            return tensor[number]
        if name == "order" or name.startswith(("data:", "shared:")):
            return tensor  # rows that sit out read the samples of one that does not, in whatever panel
        return tensor[number * self.rows : (number + 1) * self.rows]


def panels_of(known: Known, recipe: Recipe, width: int, device: str) -> Panels:
    """The panels of a stack of so many rows.

    What all members read or compute is read and computed once, so those that share it are one panel; and so are members whose
    batches come from streams, since a failure would leave them at different places of one stream.
    """
    if device != "cpu" or recipe.alike or isinstance(known.built.data, Streamed):
        return Panels(1, width)
    room = cache_bytes(torch.get_num_threads())
    count = num_panels(width, _step_bytes(known, recipe.layout), room)
    return Panels(count, -(-width // count))


def _step_bytes(known: Known, layout: Layout) -> int:
    """About what one member's step passes over: its model, slots, gradients as they are computed and end to end, and what is saved for the backward pass."""
    row = layout.width * layout.dtype.itemsize
    model = known.built.model
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return (len(layout.slots) + 2) * row + held + known.probe.saved_bytes
