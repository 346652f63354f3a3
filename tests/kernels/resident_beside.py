"""One stack's steps taken in several ways: traced, traced in float64, and as machine code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool import machine
from carpool.adapters.torch import launch, resident, stack
from carpool.adapters.torch.stacked import train_step
from carpool.adapters.torch.train import TorchAdapter
from carpool.job import Job
from carpool.planning.cursor import Chunk, Cursor, cut, supplies

Tensors = dict[str, Tensor]
_FED = ("active", "first", "batch", "k", "table", "due", "clip", "sums", "taken", "order")
_REAL = (torch.float32, torch.float64)


class Beside:
    """Jobs in one stack, and the tensors of it for each way of taking its steps."""

    def __init__(self, jobs: Sequence[Job], vector_bytes: int | None = None) -> None:
        adapter = TorchAdapter(compile=False)
        for job in jobs:
            adapter.describe(job)
        self.session: Any = adapter.fuser.open(list(jobs), len(jobs), adapter.device("cpu"))  # type: ignore[union-attr]
        assert self.session._panels.count == 1
        self.recipe = self.session._recipe
        self._courses = {row: self.session._lookup(job).course for row, job in enumerate(jobs)}
        self.traced: Tensors = self.session._panels.cut(self.session._tensors)[0]
        self.exact = {name: _widened(tensor) for name, tensor in self.traced.items()}
        self.nudged = {name: tensor.clone() for name, tensor in self.traced.items()}
        _nudge(self.nudged["weights"])
        self.made = {name: tensor.clone() for name, tensor in self.traced.items()}
        self.vector_bytes = vector_bytes or machine.vector_bytes()
        self._codes: dict[int, resident.Code] = {}

    def chunks(self, max_steps: int = 64) -> Iterator[Chunk]:
        """Chunk after chunk, each laid before everyone; whoever is given one runs it."""
        cursors = dict.fromkeys(self._courses, Cursor())
        while chunk := cut(supplies(self._courses, cursors), cursors, max_steps):
            feed = self.session._feed
            ahead = feed.ahead(chunk)
            feed.tell(chunk, chunk.steps)
            feed.lay(ahead)
            for mine in (self.exact, self.nudged, self.made):
                for name in _FED:
                    mine[name].copy_(self.traced[name])
            yield chunk
            for row in chunk.rows:
                cursors[row] = cursors[row].advanced(chunk.steps, row in chunk.ends)
                if row in chunk.ends:
                    self.session._hypers.end_epoch(row, {"loss": 1.0})

    def code(self, size: int) -> resident.Code:
        if size not in self._codes:
            self._codes[size] = resident.training_code(self.recipe, size, self.traced, self.vector_bytes)
        return self._codes[size]

    def bound(self, size: int, tensors: Tensors | None = None) -> launch.Bound:
        return launch.bound(self.code(size), self.made if tensors is None else tensors)

    def take_traced(self, chunk: Chunk) -> None:
        """A chunk's steps in all the ways that are traced."""
        for tensors in (self.traced, self.exact, self.nudged):
            self.take(tensors, chunk)

    def take(self, tensors: Tensors, chunk: Chunk) -> None:
        """A chunk's steps as traced."""
        step = train_step(self.recipe, chunk.size)
        for _ in range(chunk.steps):
            step(tensors)

    def keep(self, mine: Tensors) -> None:
        """The session goes on from where these tensors are: the next chunk is laid for them."""
        for name in self.state:
            self.traced[name].copy_(mine[name])

    @property
    def state(self) -> list[str]:
        """What a step changes or counts."""
        changed = ("sums", "taken", "alive", "k")
        return [name for name in self.made if stack.is_state(name) or name in changed]

    @property
    def columns(self) -> list[int]:
        """Where leaves lie in a row: between them there is nothing."""
        leaves = self.recipe.layout.leaves
        return [column for leaf in leaves for column in range(leaf.start, leaf.start + leaf.size)]

    def close(self) -> None:
        self.session.close()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64, copy=True) if tensor.dtype == torch.float32 else tensor.clone()


def faults_of(beside: Beside, double: bool) -> list[str]:
    """In what machine code did worse than torch, or otherwise.

    Torch's own error is that of two runs, one of them with weights that began one unit in the last place elsewhere: by
    chance a single one may be right where the net makes much of little.
    """
    found: list[str] = []
    for name in beside.state:
        traced, made, nudged = beside.traced[name], beside.made[name], beside.nudged[name]
        if not traced.is_floating_point():
            if not torch.equal(traced, made):
                found.append(f"{name}: {made.tolist()} for {traced.tolist()}")
            continue
        exact = traced if double else beside.exact[name]
        if name in ("weights", "gathered") or name.startswith("slot:"):
            traced, made, nudged, exact = (t[:, beside.columns] for t in (traced, made, nudged, exact))
        eps = 2.0**-53 if double else 2.0**-24
        least = eps * _largest(exact)
        own, mine = max(_apart(traced, exact), _apart(nudged, exact)), _apart(made, exact)
        most = _FACTOR * own + 8 * least
        if not mine <= most:
            found.append(f"{name}: {mine:.3g} from float64, torch {own:.3g}, at most {most:.3g}")
    return found


_FACTOR = 4


def _nudge(weights: Tensor) -> None:
    """Each weight to a number beside it, up and down by turns."""
    ways = torch.full_like(weights, torch.inf)
    ways[:, ::2] = -torch.inf
    weights.copy_(torch.where(weights == 0, weights, torch.nextafter(weights, ways)))


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _apart(first: Tensor, second: Tensor) -> float:
    """How far the farthest number is; NaN is like NaN, infinity like itself."""
    first, second = first.to(torch.float64), second.to(torch.float64)
    alike = (first == second) | (first.isnan() & second.isnan())
    return torch.where(alike, 0.0, first - second).abs().max().item() if first.numel() else 0.0
