"""Hyper-parameters of a fused group: the real optimizers and schedulers, stepped ahead of the device into a table."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.torch.absorb import group_options, restore_groups
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.layout import Layout


@dataclass(frozen=True)
class Ahead:
    """A chunk's numbers, [steps or 1, members, groups, hypers], and how its schedulers stood before."""

    numbers: np.ndarray
    due: np.ndarray = field(default_factory=lambda: np.ones((1, 1), dtype=bool))
    """Which rows update at which step: [steps, members]. Schedulers that step by batch step with the updates."""
    before: Mapping[int, Any] = field(default_factory=dict)
    errors: Mapping[int, BaseException] = field(default_factory=dict)


class Hypers:
    """The members' hyper-parameters as numbers: [members, groups, hypers], read anew only when something stepped."""

    def __init__(self, layout: Layout, members: Sequence[Built | None]) -> None:
        self._layout = layout
        self._members = list(members)
        shape = (len(members), len(layout.spans), len(layout.update.hypers))
        self._now = np.zeros(shape)
        self._clip = np.full(len(members), np.inf)
        self._first: dict[int, Any] = {}
        for row, built in enumerate(members):
            self.set(row, built)

    def set(self, row: int, built: Built | None) -> None:
        """Another job takes the row, or none."""
        self._members[row] = built
        self._first.pop(row, None)
        if built is not None and built.timer is not None:
            self._first[row] = self._snapshot(row)
        self.read(row)

    def moved(self, rows: Sequence[int], width: int) -> Hypers:
        """The same members in other rows of a stack of another width."""
        made = Hypers(self._layout, [*(self._members[row] for row in rows), *[None] * (width - len(rows))])
        made._first = {place: self._first[row] for place, row in enumerate(rows) if row in self._first}
        return made

    def read(self, row: int) -> None:
        """Reads a member's numbers from its real optimizer."""
        built = self._members[row]
        if built is None:
            return
        self._now[row] = [self._layout.update.numbers(group) for group in built.optimizer.param_groups]
        self._clip[row] = np.inf if built.job.clip_norm is None else built.job.clip_norm

    def clip(self) -> Tensor:
        return torch.from_numpy(self._clip.copy())

    def now(self) -> np.ndarray:
        """The numbers of the next step: [1, members, groups, hypers]."""
        return self._now[None].copy()

    def ahead(self, rows: Sequence[int], due: np.ndarray) -> Ahead:
        """The numbers of the next steps. Schedulers that step by batch are stepped, for real, as they are read.

        One that raises (OneCycleLR past its total) is its own row's failure.
        """
        for row in rows:
            if self._is_watched(row):
                self.read(row)
        timed = [row for row in rows if self._steps_by_batch(row)]
        if not timed:
            return Ahead(self.now(), due)
        before = {row: self._snapshot(row) for row in timed}
        errors: dict[int, BaseException] = {}
        table = np.repeat(self._now[None], len(due), axis=0)
        for row in timed:
            try:
                table[:, row] = [self._stepped(row, updates) for updates in due[:, row]]
            except Exception as error:
                errors[row] = error
            self.read(row)
        made = Ahead(table, due, before, errors)
        if errors:
            for row in timed:
                self.rewind(row, 0, made)
        return made

    def rewind(self, row: int, steps: int, ahead: Ahead) -> None:
        """The row took only so many of the steps that were prepared: its scheduler goes back to that."""
        if row not in ahead.before:
            return
        built = self._members[row]
        assert built is not None
        groups, scheduler = ahead.before[row]
        restore_groups(built, groups)
        assert built.timer is not None
        built.timer.scheduler.load_state_dict(scheduler)
        for updates in ahead.due[:steps, row]:
            self._stepped(row, updates)
        self.read(row)

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        """Steps a scheduler that steps by epoch."""
        built = self._members[row]
        if built is not None and built.timer is not None:
            mark_stepped(built)
            built.timer.step_epoch(dict(metrics))
            self.read(row)

    def restart(self) -> None:
        """Puts every member's real optimizer and scheduler back to where they were when it came in."""
        for row, before in self._first.items():
            built = self._members[row]
            if built is not None and built.timer is not None:
                restore_groups(built, before[0])
                built.timer.scheduler.load_state_dict(before[1])

    def _is_watched(self, row: int) -> bool:
        """Whether a callback of the job's may have set other hyper-parameters since they were read."""
        built = self._members[row]
        return built is not None and bool(built.job.callbacks)

    def _steps_by_batch(self, row: int) -> bool:
        built = self._members[row]
        return built is not None and built.timer is not None and built.timer.every == "step"

    def _snapshot(self, row: int) -> Any:
        built = self._members[row]
        assert built is not None
        assert built.timer is not None
        return group_options(built), copy.deepcopy(built.timer.scheduler.state_dict())

    def _stepped(self, row: int, updates: bool) -> list[tuple[float, ...]]:
        built = self._members[row]
        assert built is not None
        assert built.timer is not None
        numbers = [self._layout.update.numbers(group) for group in built.optimizer.param_groups]
        if not updates:
            return numbers
        mark_stepped(built)
        built.timer.scheduler.step()  # type: ignore[call-arg]  # ReduceLROnPlateau never steps by batch
        return numbers


def mark_stepped(built: Built) -> None:
    """Tells the scheduler that its optimizer has stepped: in a fused group the stack did that for it."""
    built.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's own wrapper of `step` sets


def columns(layout: Layout, numbers: np.ndarray, counts: Tensor, due: Tensor) -> Tensor:
    """The update's scalars for a chunk: [steps, members, groups, columns], made in float64 on the device.

    `counts` is how many updates each member's group has had before the chunk, [members, groups], and `due` which rows
    update at which step, [steps, members].
    """
    table = torch.from_numpy(numbers).to(counts.device)
    ordinals = (due.cumsum(0).to(torch.float64) + (~due))[
        ..., None
    ]  # at a step without update: the next one's
    named = {name: table[..., i] for i, name in enumerate(layout.update.hypers)}
    made = layout.update.scalars(named, counts.to(torch.float64) + ordinals)
    return torch.stack(torch.broadcast_tensors(*made), dim=-1)
