"""Chunks that are kept back to be launched together: while nothing is decided between them, many epochs are one launch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from carpool.adapters.keras.engine import Engine, Feed
from carpool.planning.cursor import Chunk

MOST_EPOCHS = 16
_MOST_STEPS = 4096  # in a launch: how long Ctrl-C and the neighbours wait
_MOST_BYTES = 32 << 20  # of the table that says which samples are read
_LONG_S = 0.25


class Launch:
    """A program that was enqueued, and what it showed once it is read."""

    def __init__(self, logs: Any) -> None:
        self.logs, self.at_s = logs, time.perf_counter()
        self._shown: Mapping[str, np.ndarray] | None = None

    def read(self, engine: Engine) -> Mapping[str, np.ndarray]:
        if self._shown is None:
            self._shown = engine.read(self.logs)
        return self._shown


@dataclass
class Seen:
    """What a chunk will show: its launch once there is one, and which of the launch's epochs it is."""

    launch: Launch | None = None
    epoch: int | None = None

    def read(self, engine: Engine) -> Mapping[str, np.ndarray]:
        assert self.launch is not None
        shown = self.launch.read(engine)
        return shown if self.epoch is None else {name: values[self.epoch] for name, values in shown.items()}


@dataclass
class Held:
    """Chunks that wait, all of the same rows, epoch after epoch of the same `parts` (steps, samples in a batch)."""

    parts: tuple[tuple[int, int], ...]
    most: int
    """Epochs that one launch may cover now."""
    full: int
    """Epochs that the program has room for."""
    wanted: int = 1
    waiting: list[tuple[Chunk, Feed, Seen]] = field(default_factory=list)

    @classmethod
    def of(cls, parts: tuple[tuple[int, int], ...], width: int) -> Held | None:
        """None where an epoch is no short list of launches, or too long to be kept back."""
        if not 1 <= len(parts) <= 2:
            return None
        steps = sum(steps for steps, _ in parts)
        samples = sum(steps * size for steps, size in parts)
        most = min(MOST_EPOCHS, _MOST_STEPS // steps, _MOST_BYTES // (4 * width * samples))
        return cls(parts, most, most) if most >= 1 else None

    def takes(self, chunk: Chunk) -> bool:
        """Whether the chunk is the next part of the pattern, with every row where the others are."""
        at = len(self.waiting) % len(self.parts)
        is_in_step = all((cursor.batch == 0) == (at == 0) for cursor in chunk.cursors)
        same = not self.waiting or self.waiting[0][0].rows == chunk.rows
        return same and is_in_step and (chunk.steps, chunk.size) == self.parts[at]

    @property
    def epochs(self) -> int:
        """Whole epochs that wait."""
        return len(self.waiting) // len(self.parts)

    @property
    def is_due(self) -> bool:
        """The first epoch goes at once, so that the device is never idle, then two, four and so on."""
        return self.epochs >= min(self.wanted, self.most)

    def taken(self) -> list[tuple[Chunk, Feed, Seen]]:
        """Takes the whole epochs out."""
        count = min(self.epochs, self.most) * len(self.parts)
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        self.wanted = min(self.most, 2 * self.wanted)
        return taken

    def slow_down(self, launch: Launch) -> None:
        """A launch that took long was too long for those who wait."""
        if time.perf_counter() - launch.at_s > _LONG_S and self.most > 1:
            self.most = max(1, self.most // 2)
