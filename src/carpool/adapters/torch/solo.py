"""The solo session: one job on a device, by ordinary autograd and its real optimizer. It runs whatever torch runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from carpool.adapters.base import JobState, MetricRow, Session, StepFailure, Ticket
from carpool.adapters.torch.absorb import absorb_into, group_options, scheduler_state, slots_by_key
from carpool.adapters.torch.build import Arrays, Built, ManualStep, reseed, seeded
from carpool.adapters.torch.cadence import due_at
from carpool.adapters.torch.phases import combined
from carpool.adapters.torch.precision import untouched
from carpool.adapters.torch.stacked import evaluation_step
from carpool.adapters.torch.store import Store, shuffled
from carpool.kernels.random import Keyed
from carpool.planning.cursor import Chunk, Course, Cursor


class SoloSession(Session):
    """Trains the user's own objects in place, on the device, and takes them back to where they came from."""

    def __init__(self, built: Built, course: Course, device: str, store: Store, random: bool = True) -> None:
        self._built, self._course, self._device = built, course, device
        self._kind = torch.device(device).type
        self._homes = _homes(built.model)
        self._home = vars(built.model).get("_device")  # where a LightningModule says that it is
        self._data = [store.on(device, tensor) for tensor in built.data.tensors]
        held = built.validation.tensors if built.validation else ()
        self._validation = [store.on(device, tensor) for tensor in held]
        self._order: tuple[int, torch.Tensor] | None = None
        self._best: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._shown: dict[int, dict[str, float]] = {}
        self.schedules = any(phase.timer is not None for phase in built.phases)
        self._diverged = False
        self._random = random
        self._buffered = any(True for _ in built.model.buffers())
        _move(built, device)
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(device)

    def advance(self, chunk: Chunk) -> Ticket:
        cursor = chunk.cursors[0]
        totals: dict[str, float] = {}
        if self._diverged:
            return Ticket(chunk, (totals, 0, True))
        with seeded(self._built.job.seed), untouched(self._built.job.precision, self._kind):
            for step in range(chunk.steps):
                try:
                    values = self._step(cursor.epoch, cursor.batch + step, cursor.step + step, chunk.size)
                except Exception as error:
                    done = Chunk(chunk.rows, chunk.cursors, chunk.size, step)
                    raise StepFailure(Ticket(done, (totals, step, False)), {0: error}) from error
                if values is None:
                    self._diverged = True
                    return Ticket(chunk, (totals, step, True))
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + value * chunk.size
        return Ticket(chunk, (totals, chunk.steps, False))

    def _step(self, epoch: int, batch: int, step: int, size: int) -> dict[str, float] | None:
        """One step's values; None when the loss is not finite, and then nothing has changed."""
        built = self._built
        start = batch * self._course.batch_size
        index = self._positions(epoch)[start : start + size]
        inputs = built.data.batch([tensor[index] for tensor in self._data])
        reseed(built.seed * 1_000_003 + step)  # for operators that are not keyed
        if built.manual is not None:
            return self._take_manually(built.manual, inputs, batch, step)
        due = due_at(built, self._course, batch, step)
        for number, phase in enumerate(built.phases):
            if step % phase.every == 0:
                values = self._take_phase(number, inputs, batch, step, due[number])
                if values is None:
                    return None
                self._shown[number] = values
        self._steps = step + 1
        for phase, updated in zip(built.phases, due, strict=True):
            if updated and phase.timer is not None:
                phase.timer.step_update()
        return combined(built.job, [phase.loss for phase in built.phases], list(self._shown.values()))

    def _take_manually(self, take: ManualStep, inputs: Any, batch: int, step: int) -> dict[str, float] | None:
        """A step that updates by itself; None when its loss is not finite, and then what it did stands."""
        with torch.enable_grad(), Keyed(self._built.seed, step):
            values = take(self._built.model, inputs, batch, self._built.phases)
        if not math.isfinite(values["loss"]):
            return None
        self._steps = step + 1
        return values

    def _take_phase(
        self, number: int, inputs: Any, batch: int, step: int, due: bool
    ) -> dict[str, float] | None:
        """One update of a step; None when its loss is not finite, and then it has changed nothing."""
        built, phase = self._built, self._built.phases[number]
        buffers = {name: b.clone() for name, b in built.model.named_buffers()} if self._buffered else {}
        if batch % built.job.accumulate == 0:
            phase.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad(), Keyed(built.seed, step, number) if self._random else nullcontext():
            values = phase.step(built.model, inputs, batch)
        loss = values[phase.loss]
        if not math.isfinite(loss.item()):
            _restore(built.model, buffers)
            return None
        (loss / built.job.accumulate).backward(inputs=phase.trained if phase.name else None)
        if due:
            if built.job.clip_norm is not None:
                clip_grad_norm_(
                    phase.trained if phase.name else built.model.parameters(), built.job.clip_norm
                )
            phase.optimizer.step()
        return {name: value.item() for name, value in values.items()}

    def _positions(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            data = self._built.data
            places = data.index if data.index is not None else torch.arange(data.length)
            places = places.to(self._device)
            if self._built.job.shuffle:
                seed = torch.tensor([self._built.seed], device=self._device)
                places = shuffled(places[None], seed, torch.tensor([epoch], device=self._device))[0]
            self._order = (epoch, places)
        return self._order[1]

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        totals, steps, diverged = ticket.payload
        sums = {name: float(value) for name, value in totals.items()}
        return (MetricRow(0, steps, steps * ticket.chunk.size, sums, diverged),)

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        validation = self._built.validation
        if validation is None or not rows:
            return ()
        totals: dict[str, torch.Tensor] = {}
        with torch.no_grad(), seeded(self._built.job.seed), evaluating(self._built.model):
            batches = _batches(validation, self._validation, self._course.batch_size)
            for number, (size, batch) in enumerate(batches):
                with Keyed(self._built.seed, evaluation_step(self._steps, number)):
                    values = self._built.evaluate(self._built.model, batch, number)
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + value.to(torch.float64) * size
        return (MetricRow(0, 0, validation.length, {name: float(value) for name, value in totals.items()}),)

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        for phase in self._built.phases:
            if phase.timer is not None:
                phase.timer.step_epoch(dict(metrics))

    def keep(self, rows: Sequence[int]) -> None:
        if rows:
            self._best = {
                name: tensor.detach().clone() for name, tensor in _leaves(self._built.model).items()
            }

    def revert(self, rows: Sequence[int]) -> None:
        if rows:
            _restore(self._built.model, self._best)

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        built = self._built
        slots = {key: _copied(own) for key, own in slots_by_key(built).items()}
        model = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _leaves(built.model).items()}
        cursor = Cursor(step=self._steps)
        return (JobState(cursor, model, slots, group_options(built), scheduler_state(built)),)

    def load(self, row: int, state: JobState) -> None:
        absorb_into(self._built, state)
        self._steps = state.cursor.step
        self._diverged = False

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        with torch.no_grad(), evaluating(self._built.model):
            return self._built.model(inputs.to(self._device))

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.startswith("cuda") else None

    def close(self) -> None:
        for phase in self._built.phases:
            phase.optimizer.zero_grad(set_to_none=True)
        for name, tensor in _leaves(self._built.model).items():
            tensor.data = tensor.data.to(self._homes[name])
        if self._home is not None:
            vars(self._built.model)["_device"] = self._home
        _follow(self._built)
        self._data, self._validation, self._order, self._best = [], [], None, {}
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside, and each in its own mode again outside."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _leaves(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _homes(model: nn.Module) -> dict[str, torch.device]:
    return {name: tensor.device for name, tensor in _leaves(model).items()}


def _move(built: Built, device: str) -> None:
    built.model.to(device)
    _follow(built)


def _follow(built: Built) -> None:
    """The optimizer's state to where its parameters are; a host-side step counter stays on the host."""
    states = (item for phase in built.phases for item in phase.optimizer.state.items())
    for parameter, slots in states:
        for name, slot in slots.items():
            if isinstance(slot, torch.Tensor) and (name != "step" or slot.device.type != "cpu"):
                slots[name] = slot.to(parameter.device)


def _restore(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        leaves = _leaves(model)
        for name, tensor in tensors.items():
            leaves[name].copy_(tensor)


def _copied(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: slot.detach().to("cpu", copy=True) if isinstance(slot, torch.Tensor) else slot
        for name, slot in slots.items()
    }


def _batches(arrays: Arrays, tensors: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int, Any]]:
    for start in range(0, arrays.length, size):
        parts = [tensor[start : start + size] for tensor in tensors]
        yield len(parts[0]), arrays.batch(parts)
