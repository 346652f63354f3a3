"""The solo session: one job on a device, by ordinary autograd and its real optimizer. It runs whatever torch runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from carpool import ambient
from carpool.adapters.base import DeviceFull, JobState, MetricRow, Session, StepFailure, Ticket
from carpool.adapters.torch.absorb import (
    absorb_into,
    group_options,
    is_number,
    scheduler_state,
    slots_by_key,
)
from carpool.adapters.torch.batches import batches_of
from carpool.adapters.torch.build import Arrays, Built, LivePhase, ManualStep
from carpool.adapters.torch.cadence import due_at
from carpool.adapters.torch.clock import Receipt, Stream
from carpool.adapters.torch.full import free, is_full
from carpool.adapters.torch.phases import combined
from carpool.adapters.torch.precision import untouched
from carpool.adapters.torch.quick import Groups, can_quicken, quickened, step
from carpool.adapters.torch.retake import Mark
from carpool.adapters.torch.stack import initial_states
from carpool.adapters.torch.stacked import evaluation_step
from carpool.adapters.torch.store import Store
from carpool.adapters.torch.transfer import landed
from carpool.errors import failure
from carpool.kernels.table import alone
from carpool.memory import heap
from carpool.planning.cursor import Chunk, Course, Cursor, Supply

_SLICE_S = 0.05  # how long a chunk may take: whoever shares the device waits for it


class SoloSession(Session):
    """Trains the user's own objects in place, on the device, and takes them back to where they came from."""

    def __init__(
        self,
        built: Built,
        course: Course,
        device: str,
        store: Store,
        random: bool = True,
        ambient_too: bool = True,
        quick: bool = False,
    ) -> None:
        self._built, self._course, self._device = built, course, device
        self._kind = torch.device(device).type
        self._waits = self._kind == "cpu"  # elsewhere what a step shows is added up on the device
        self._away = store.away
        self._home = vars(built.model).get("_device")  # where a LightningModule says that it is
        held = built.validation.tensors if built.validation else ()
        self._validation = [store.on(device, tensor) for tensor in held]
        self._best: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._shown: dict[int, dict[str, float]] = {}
        self._plain = len(built.phases) == 1 and not built.phases[0].name
        self.schedules = any(phase.timer is not None for phase in built.phases)
        self._diverged = False
        self._mark = Mark(built)
        self._random = random
        self._generators = None if ambient_too else ("torch",)
        quick = quick and can_quicken(built.model)
        self._quick = [phase.optimizer for phase in built.phases] if quick else []
        self._lent: Groups = []
        self._buffered = any(True for _ in built.model.buffers())
        self._away.send(built.model, device)
        _follow(built)
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(device)
        else:
            heap.keep()
        self._stream = Stream(device, built.job.priority, built.job.share)
        try:
            self._batches = batches_of(built, device, store)
        except BaseException:  # a session that cannot be opened holds up nobody
            self._stream.close()
            raise

    def turn(self) -> AbstractContextManager[object]:
        return self._stream.turn()

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        try:
            found = self._batches.supply()
        except BaseException as error:
            failure(error)
            return {0: error}
        return {} if found is None else {0: found}

    def depth(self, row: int) -> tuple[int, int] | None:
        return self._batches.depth()

    def advance(self, chunk: Chunk) -> Ticket:
        """Runs the chunk's steps, or as many as fit the slice."""
        totals: dict[str, Any] = {}
        if self._diverged:
            return _ticket(chunk, totals, 0, True)
        done, error, whole = 0, None, True
        with (
            ambient.seeded(self._built.job.seed, self._generators),
            untouched(self._built.job.precision, self._kind),
            quickened(self._quick) as self._lent,
        ):
            enough = time.perf_counter() + _SLICE_S
            while done < chunk.steps and not (done and time.perf_counter() > enough):
                self._mark = Mark(self._built)
                try:
                    values = self._step(chunk, done)
                except BaseException as raised:
                    failure(raised)
                    error, whole = raised, not is_full(raised) or self._mark.retakes()
                    break
                if values is None:
                    self._diverged = True
                    return _ticket(chunk, totals, done, True)
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + value * chunk.size
                done += 1
        self._batches.take(done)
        if error is not None and is_full(error) and not whole:
            raise DeviceFull((), error) from error
        ticket = _ticket(chunk.shortened(done), totals, done, False)
        if error is not None and is_full(error):
            raise DeviceFull([ticket], error) from error
        if error is not None:
            raise StepFailure([ticket], {0: error}) from error
        return ticket

    def _step(self, chunk: Chunk, ahead: int) -> dict[str, Any] | None:
        """One step's values; None when the loss is not finite, and then nothing has changed."""
        built, cursor = self._built, chunk.cursors[0]
        step, batch = cursor.step + ahead, cursor.batch + ahead
        inputs = self._batches.batch(cursor, ahead, chunk.size)
        ambient.reseed(built.seed * 1_000_003 + step, self._generators)  # for what is not keyed
        if built.manual is not None:
            return self._take_manually(built.manual, inputs, batch, step)
        due = due_at(built, chunk, 0, ahead)
        if self._plain:
            values = self._take_phase(0, inputs, batch, step, due[0])
        else:
            values = self._take_phases(inputs, batch, step, due)
        if values is None:
            return None
        self._steps = step + 1
        if self.schedules:
            for phase, updated in zip(built.phases, due, strict=True):
                if updated and phase.timer is not None:
                    phase.timer.step_update()
        return values

    def _take_phases(self, inputs: Any, batch: int, step: int, due: Sequence[bool]) -> dict[str, Any] | None:
        """The updates of a step with phases; one that sits out shows what it showed last."""
        phases = self._built.phases
        for number, phase in enumerate(phases):
            if step % phase.every == 0:
                values = self._take_phase(number, inputs, batch, step, due[number])
                if values is None:
                    return None
                self._shown[number] = values
        return combined(self._built.job, [phase.loss for phase in phases], list(self._shown.values()))

    def _take_manually(self, take: ManualStep, inputs: Any, batch: int, step: int) -> dict[str, Any] | None:
        """A step that updates by itself; None when its loss is not finite, and then what it did stands."""
        self._mark.dirty = True
        with torch.enable_grad(), alone(self._built.seed, step):
            values = take(self._built.model, inputs, batch, self._built.phases)
        if not math.isfinite(values["loss"]):
            return None
        self._steps = step + 1
        return values

    def _take_phase(
        self, number: int, inputs: Any, batch: int, step: int, due: bool
    ) -> dict[str, Any] | None:
        """One update of a step; None when its loss is not finite, and then it has changed nothing."""
        built, phase = self._built, self._built.phases[number]
        buffers = {name: b.clone() for name, b in built.model.named_buffers()} if self._buffered else {}
        try:
            values, known = self._differentiated(number, inputs, batch, step)
            if not math.isfinite(
                known.read()
            ):  # asked only now: meanwhile the device had the backward pass to do
                _restore(built.model, buffers)
                return None
            if due:
                self._update(phase)
        except BaseException:
            _restore(built.model, buffers)
            raise
        if self._waits:
            return {name: value.item() for name, value in values.items()}
        return {name: value.detach().to(self._device, torch.float64) for name, value in values.items()}

    def _differentiated(self, number: int, inputs: Any, batch: int, step: int) -> tuple[Any, Receipt]:
        """A phase's values, its gradients gathered, and its loss on the way to the host."""
        built, phase = self._built, self._built.phases[number]
        if batch % built.job.accumulate == 0:
            phase.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad(), alone(built.seed, step, number) if self._random else nullcontext():
            values = phase.step(built.model, inputs, batch)
        loss = values[phase.loss]
        known = Receipt(loss.detach())
        if built.job.accumulate > 1:
            loss = loss / built.job.accumulate
        loss.backward(inputs=phase.trained if phase.name else None)
        return values, known

    def _update(self, phase: LivePhase) -> None:
        built = self._built
        if built.job.clip_norm is not None:
            clip_grad_norm_(phase.trained if phase.name else built.model.parameters(), built.job.clip_norm)
        self._mark.dirty |= any(group.get("fused") for group in phase.optimizer.param_groups)
        step(phase.optimizer, self._lent)
        self._mark.dirty = True

    def done(self, ticket: Ticket) -> bool:
        return bool(ticket.payload[1].done())

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        names, receipt, steps, diverged = ticket.payload
        sums = dict(zip(names, receipt.read().tolist(), strict=True))
        return (MetricRow(0, steps, steps * ticket.chunk.size, sums, diverged),)

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        validation = self._built.validation
        if validation is None or not rows:
            return ()
        try:
            return (self._evaluated(validation),)
        except Exception as error:
            if not is_full(error):
                raise
        free()
        return (self._evaluated(validation),)  # what it raises now is the job's

    def _evaluated(self, validation: Arrays) -> MetricRow:
        totals: dict[str, torch.Tensor] = {}
        seeded = ambient.seeded(self._built.job.seed)
        with torch.no_grad(), seeded, evaluating(self._built.model):
            batches = _batches(validation, self._validation, self._course.batch_size)
            for number, (size, batch) in enumerate(batches):
                with alone(self._built.seed, evaluation_step(self._steps, number)):
                    values = self._built.evaluate(self._built.model, batch, number)
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + value.to(torch.float64) * size
        return MetricRow(0, 0, validation.length, {name: float(value) for name, value in totals.items()})

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

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        return tuple(replace(initial_states(self._built), cursor=Cursor(step=self._steps)) for _ in rows)

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        built = self._built
        slots = {key: _copied(own) for key, own in slots_by_key(built).items()}
        model = {name: landed(tensor) for name, tensor in _leaves(built.model).items()}
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
        self._stream.close()
        for phase in self._built.phases:
            phase.optimizer.zero_grad(set_to_none=True)
        self._away.bring(self._built.model)
        if self._home is not None:
            vars(self._built.model)["_device"] = self._home
        _follow(self._built)
        self._batches.close()
        self._validation, self._best = [], {}
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


def _ticket(chunk: Chunk, totals: Mapping[str, Any], steps: int, diverged: bool) -> Ticket:
    """What a chunk added up, numbers or tensors on the device, is on its way to the host."""
    shown = [torch.as_tensor(total, dtype=torch.float64) for total in totals.values()]
    return Ticket(
        chunk, (tuple(totals), Receipt(torch.stack(shown) if shown else torch.empty(0)), steps, diverged)
    )


def _leaves(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _follow(built: Built) -> None:
    """The optimizer's state to where its parameters are; a host-side step counter stays on the host."""
    for phase in built.phases:
        held = {p: s for p, s in phase.optimizer.state.items() if isinstance(p, torch.Tensor)}
        for parameter, slots in held.items():
            for name, slot in slots.items():
                if not isinstance(slot, torch.Tensor) or slot.device == parameter.device:
                    continue
                if not is_number(phase.optimizer, name) or slot.device.type != "cpu":
                    slots[name] = (
                        landed(slot) if parameter.device.type == "cpu" else slot.to(parameter.device)
                    )


def _restore(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        leaves = _leaves(model)
        for name, tensor in tensors.items():
            leaves[name].copy_(tensor)


def _copied(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {name: landed(slot) if isinstance(slot, torch.Tensor) else slot for name, slot in slots.items()}


def _batches(arrays: Arrays, tensors: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int, Any]]:
    for start in range(0, arrays.length, size):
        parts = [
            tensor[start : start + size].clone() for tensor in tensors
        ]  # a step may write into its input
        yield len(parts[0]), arrays.batch(parts)
