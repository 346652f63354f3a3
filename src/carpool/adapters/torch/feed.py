"""What a stack is told of a chunk before it runs: whose turn it is, where their batches lie, which scalars they update with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.torch import cadence, stack
from carpool.adapters.torch.check import Case
from carpool.adapters.torch.hypers import Ahead, Hypers, columns
from carpool.adapters.torch.orders import Orders
from carpool.adapters.torch.stacked import Recipe
from carpool.adapters.torch.standing import Rows, standing
from carpool.adapters.torch.streams import Streamed
from carpool.adapters.torch.transfer import sent
from carpool.adapters.torch.window import Window
from carpool.planning.cursor import Chunk, Cursor, Stretch, Supply

if TYPE_CHECKING:
    from carpool.adapters.torch.fuse import Known

Tensors = dict[str, Tensor]


class Feed:
    """The way from cursors to a stack's tensors. `known` has the member of each row, or None, and may change."""

    def __init__(
        self,
        recipe: Recipe,
        tensors: Tensors,
        known: Sequence[Known | None],
        batch_size: int,
        hypers: Hypers,
        window: Window | None,
    ) -> None:
        self._recipe, self._tensors, self._known = recipe, tensors, known
        self.batch_size, self._hypers, self._window = batch_size, hypers, window
        self._device = tensors["order"].device
        self.orders = Orders(tensors["order"])
        self._rows: Rows | None = None

    def moved(self, rows: Sequence[int], known: Sequence[Known | None], hypers: Hypers) -> Feed:
        """The feed of a stack into which these rows were taken over, in this order."""
        made = Feed(self._recipe, self._tensors, known, self.batch_size, hypers, self._window)
        made.orders = self.orders.moved(rows, self._tensors["order"])
        return made

    # Streams

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        assert self._window is not None, "only streams are asked for their supply"
        return self._window.supply({row: self._stream_of(row) for row in rows})

    def depth(self, row: int) -> tuple[int, int] | None:
        return self._window.depth(self._stream_of(row)) if self._window is not None else None

    def used(self, chunk: Chunk, steps: int) -> None:
        """So many steps of a chunk were taken: what streams held for them is free."""
        if self._window is not None:
            self._window.take([self._stream_of(row) for row in chunk.rows], steps)

    def _stream_of(self, row: int) -> Streamed:
        data = self._member(row).built.data
        assert isinstance(data, Streamed)
        return data

    def _member(self, row: int) -> Known:
        member = self._known[row]
        assert member is not None, f"row {row} is free"
        return member

    # Chunks

    def rows(self, chunk: Chunk) -> Rows:
        """The chunk's rows; those of the chunk before are most often the same ones."""
        if self._rows is None or self._rows.rows is not chunk.rows:
            self._rows = Rows(chunk.rows, len(self._known), self._device)
        return self._rows

    def tell(self, chunk: Chunk, steps: int) -> None:
        """Which rows run from where, with nothing counted yet."""
        rows, where, feed = self.rows(chunk), standing(chunk.cursors), self._tensors
        for name in (
            "k",
            "sums",
            "taken",
        ):  # first: whatever raises from here on, this chunk has counted nothing
            feed[name].zero_()
        self.orders.lay(rows, where.epochs)
        if self._window is not None:
            arrays = [tensor for name, tensor in feed.items() if name.startswith("data:")]
            self._window.lay([self._stream_of(row) for row in chunk.rows], steps, arrays)
        starts = where.batches * self.batch_size if self._window is None else np.zeros_like(where.batches)
        told = sent(np.stack([starts, where.batches, where.steps]), self._device)
        stack.activate(feed, rows.device, told[0])
        feed["batch"][rows.device] = told[1]
        feed["steps"][rows.device] = torch.where(
            feed["alive"][rows.device], told[2], feed["steps"][rows.device]
        )
        if self._recipe.clips:
            feed["clip"].copy_(sent(self._hypers.clip(), self._device))

    def ahead(self, chunk: Chunk) -> Ahead:
        """The scalars of a chunk's steps, and which rows update at which of them."""
        rows, built = self.rows(chunk), self._member(chunk.rows[0]).built
        due = cadence.due(built, chunk, standing(chunk.cursors), rows, len(self._known))
        return self._hypers.ahead(chunk.rows, due)

    def ahead_of(self, stretch: Stretch, epochs: int) -> Ahead:
        """The same of so many of a stretch's epochs."""
        built, width = self._member(stretch.rows[0]).built, len(self._known)
        dues = [
            cadence.due(built, chunk, standing(chunk.cursors), self.rows(chunk), width)
            for chunk in stretch.chunks
        ]
        return self._hypers.ahead(stretch.rows, np.tile(np.concatenate(dues), (epochs, 1, 1)))

    def now(self) -> Ahead:
        """Those of one step as they are, in which every row and phase updates, also where it would only gather or sit out."""
        return Ahead(self._hypers.now(), np.ones((1, len(self._known), len(self._recipe.phases)), dtype=bool))

    def lay(self, ahead: Ahead) -> None:
        """Lays the table of a chunk: which rows update at which step, and with which scalars."""
        steps, feed = len(ahead.due), self._tensors
        due = sent(ahead.due, self._device)
        table = columns(self._recipe.layout, ahead.numbers, feed["updates"], due, feed["table"].shape[-1])
        feed["table"][:, :steps] = table.transpose(0, 1).to(feed["table"].dtype)
        feed["due"][:, :steps] = due.transpose(0, 1)

    def case(self, row: int, cursor: Cursor, ahead: int, size: int) -> Case:
        """One row's step alone, so many after the cursor's: its own model, its tensors and its batch."""
        start, step = self._start(cursor, ahead, size), cursor.step + ahead
        index = self._tensors["order"][row, start : start + size].to(torch.int64)
        data = [tensor[index] for name, tensor in self._tensors.items() if name.startswith("data:")]
        own = {name: tensor[row].clone() for name, tensor in self._tensors.items() if stack.is_state(name)}
        own |= {f"fixed:{name}": self._tensors[f"shared:{name}"] for name in self._recipe.shared}
        counts = own["updates"].cpu().numpy()
        return Case(self._member(row).built, own, data, counts, step, cursor.batch + ahead)

    def _start(self, cursor: Cursor, ahead: int, size: int) -> int:
        """Where in a row's order the batch lies that comes so many after the cursor's."""
        if self._window is not None:
            return ahead * size
        return (cursor.batch + ahead) * self.batch_size
