"""Hyper-parameters of a fused group: the real optimizers and schedulers, stepped ahead of the device into a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.torch.absorb import group_options, restore_groups
from carpool.adapters.torch.build import Built, LivePhase
from carpool.adapters.torch.layout import Layout
from carpool.adapters.torch.transfer import sent
from carpool.errors import failure


@dataclass(frozen=True)
class Ahead:
    """A chunk's numbers, [steps or 1, members, groups, hypers], and how its schedulers stood before."""

    numbers: np.ndarray
    due: np.ndarray = field(default_factory=lambda: np.ones((1, 1, 1), dtype=bool))
    """Which phases of which rows update at which step: [steps, members, phases]. Schedulers that step by batch step with the updates."""
    before: Mapping[int, Any] = field(default_factory=dict)
    errors: Mapping[int, BaseException] = field(default_factory=dict)
    begun: int = 0
    """How many of these steps come before the chunk that is meant."""


class Hypers:
    """The members' hyper-parameters as numbers: [members, groups, hypers], read anew only when something stepped."""

    def __init__(self, layout: Layout, members: Sequence[Built | None]) -> None:
        self._layout = layout
        self._members = list(members)
        self._now = np.zeros((len(members), len(layout.spans), layout.hypers))
        self._clip = np.full(len(members), np.inf)
        self._first: dict[int, Any] = {}
        self._watched: set[int] = set()
        """Rows with callbacks, which may set other hyper-parameters at any time."""
        self._timed: set[int] = set()
        """Rows with a scheduler that steps by batch."""
        for row, built in enumerate(members):
            self.set(row, built)

    def set(self, row: int, built: Built | None) -> None:
        """Another job takes the row, or none."""
        self._members[row] = built
        self._first.pop(row, None)
        _put(self._watched, row, built is not None and bool(built.job.callbacks))
        _put(self._timed, row, any(phase.timer and phase.timer.by_step for phase in self._phases(row)))
        if any(phase.timer is not None for phase in self._phases(row)) or (built and built.job.callbacks):
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
        self._now[row] = self._numbers(row)
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
        for row in self._watched.intersection(rows) if self._watched else ():
            self.read(row)
        timed = sorted(self._timed.intersection(rows)) if self._timed else ()
        if not timed:
            return Ahead(self.now(), due)
        before = {row: self._snapshot(row) for row in timed}
        errors: dict[int, BaseException] = {}
        table = np.repeat(self._now[None], len(due), axis=0)
        for row in timed:
            try:
                table[:, row] = [self._stepped(row, updates) for updates in due[:, row]]
            except BaseException as error:
                failure(error)
                errors[row] = error
            self.read(row)
        made = Ahead(table, due, before, errors)
        if errors:
            for row in timed:
                self.rewind(row, 0, made)
        return made

    def rewind(self, row: int, steps: int, ahead: Ahead) -> None:
        """The row took only so many of the chunk's steps: its scheduler goes back to that."""
        if row not in ahead.before:
            return
        self._restore(row, ahead.before[row])
        for updates in ahead.due[: ahead.begun + steps, row]:
            self._stepped(row, updates)
        self.read(row)

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        """Steps the schedulers that step by epoch."""
        timed = [phase for phase in self._phases(row) if phase.timer is not None]
        for phase in timed:
            assert phase.timer is not None
            mark_stepped(phase.optimizer)
            phase.timer.step_epoch(dict(metrics))
        if timed:
            self.read(row)

    def restart(self) -> None:
        """Puts every member's real optimizers and schedulers back to where they were when it came in."""
        for row, before in self._first.items():
            if self._members[row] is not None:
                self._restore(row, before)

    def _phases(self, row: int) -> tuple[LivePhase, ...]:
        built = self._members[row]
        return () if built is None else built.phases

    def _snapshot(self, row: int) -> Any:
        built = self._members[row]
        assert built is not None
        return group_options(built), [phase.timer and phase.timer.snapshot() for phase in built.phases]

    def _restore(self, row: int, snapshot: Any) -> None:
        built = self._members[row]
        assert built is not None
        groups, timers = snapshot
        restore_groups(built, groups)
        for phase, before in zip(built.phases, timers, strict=True):
            if phase.timer is not None:
                phase.timer.restore(before)

    def _numbers(self, row: int) -> np.ndarray:
        """A member's numbers as its real optimizers hold them now: [groups, hypers]."""
        groups = (group for phase in self._phases(row) for group in phase.optimizer.param_groups)
        made = np.zeros(self._now.shape[1:])
        for number, (span, group) in enumerate(zip(self._layout.spans, groups, strict=True)):
            made[number, : len(span.update.hypers)] = span.update.numbers(group)
        return made

    def _stepped(self, row: int, updates: Sequence[bool]) -> np.ndarray:
        numbers = self._numbers(row)
        for phase, update in zip(self._phases(row), updates, strict=True):
            if update and phase.timer is not None and phase.timer.by_step:
                mark_stepped(phase.optimizer)
                phase.timer.step_update()
        return numbers


def _put(rows: set[int], row: int, belongs: bool) -> None:
    (rows.add if belongs else rows.discard)(row)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells the scheduler that its optimizer has stepped: in a fused group the stack did that for it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's own wrapper of `step` sets


def columns(layout: Layout, numbers: np.ndarray, counts: Tensor, due: Tensor, width: int) -> Tensor:
    """The updates' scalars for a chunk: [steps, members, groups, `width`], made in float64 on the device.

    `counts` is how many updates each member's group has had before the chunk, [members, groups], and `due` which
    phases of which rows update at which step, [steps, members, phases].
    """
    table = sent(numbers, counts.device)
    ordinals = due.cumsum(0).to(torch.float64) + ~due  # at a step without update: the next one's
    made = torch.zeros(*due.shape[:2], len(layout.spans), width, dtype=torch.float64, device=counts.device)
    for update in {id(span.update): span.update for span in layout.spans}.values():
        numbers_of = [number for number, span in enumerate(layout.spans) if span.update is update]
        places = _selection(numbers_of, counts.device)
        phases = _selection([layout.spans[number].phase for number in numbers_of], counts.device)
        named = {name: table[:, :, places, i] for i, name in enumerate(update.hypers)}
        parts = update.scalars(named, counts[:, places].to(torch.float64) + ordinals[:, :, phases])
        made[:, :, places, : len(parts)] = torch.stack(torch.broadcast_tensors(*parts), dim=-1)
    return made


def _selection(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index that the host need not wait for: a slice where the numbers follow one another, or are all the same."""
    first = numbers[0]
    if all(number == first for number in numbers):
        return slice(first, first + 1)
    if list(numbers) == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return sent(list(numbers), device)
