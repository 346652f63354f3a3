"""The adapter for loops of the user's own: a session steps a generator for a slice of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from carpool.adapters.base import Adapter, JobState, MetricRow, Session, StepFailure, Ticket, Trained
from carpool.ambient import Ambient
from carpool.errors import DeviceError, StepError, failure, sentence, shown
from carpool.job import Job
from carpool.loop import OwnLoop
from carpool.memory.size import size
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk, Course, Cursor, Supply
from carpool.planning.spec import ModelSpec

_SLICE_S = 0.05


class LoopSession(Session):
    """A generator between two of its yields."""

    def __init__(self, job: Job, device: str) -> None:
        loop: OwnLoop = job.model
        self._name, self._every = str(job.name), loop.every
        self._ambient = Ambient(job.seed)
        self._steps = loop.function(*loop.arguments)
        self._device = device
        self._stream: Any = None
        self.returned: Any = None

    def turn(self) -> AbstractContextManager[object]:
        """A stream of its own, where torch is used on a GPU."""
        torch = sys.modules.get("torch")
        if torch is None or not self._device.startswith("cuda"):
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        return {row: Supply(size=1, steps=MAX_CHUNK_STEPS, ends=False) for row in rows}

    def advance(self, chunk: Chunk) -> Ticket:
        """Steps the loop to the end of the slice, of the row of its history, or of itself."""
        most = min(chunk.steps, self._every - chunk.cursors[0].batch)
        values: list[Mapping[str, Any]] = []
        final, error = False, None
        with self._ambient.inside():
            enough = time.perf_counter() + _SLICE_S
            while len(values) < most and not (values and time.perf_counter() > enough):
                try:
                    values.append(self._checked(next(self._steps)))
                except StopIteration as stop:
                    final, self.returned = True, stop.value
                    break
                except BaseException as raised:
                    failure(raised)
                    error = raised
                    break
        full = chunk.cursors[0].batch + len(values) == self._every
        partial = final and chunk.cursors[0].batch + len(values) > 0
        ends = (0,) if full or partial else ()
        ticket = Ticket(Chunk(chunk.rows, chunk.cursors, 1, len(values), ends), values, final)
        if error is not None:
            raise StepFailure([ticket], {0: error}) from error
        return ticket

    def _checked(self, made: Any) -> Mapping[str, Any]:
        if not isinstance(made, Mapping) or not made:
            raise StepError(
                f"Loop {self._name!r}: "
                + sentence(
                    'each step to `yield {"loss": ...}`', type(made).__name__, "yield a dict of numbers"
                )
            )
        stray = next((name for name in made if not isinstance(name, str)), None)
        if stray is not None:
            said = sentence("names of values that are text", shown(stray), 'yield {"loss": ...}')
            raise StepError(f"Loop {self._name!r}: {said}")
        return {name: self._number(name, value) for name, value in made.items()}

    def _number(self, name: Any, value: Any) -> Any:
        """The value as it is now: on the host a number at once, elsewhere a copy that is read later."""
        if hasattr(value, "detach"):
            value = value.detach()
            if str(value.device) != "cpu":
                return value.clone()
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            expected = f"{name!r} to be a number"
            raise StepError(
                f"Loop {self._name!r}: " + sentence(expected, type(value).__name__, "yield a dict of numbers")
            ) from error

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        """A row for each step: added up one by one, an epoch's sums are the same wherever its chunks were cut."""
        return tuple(
            MetricRow(0, 1, 1, {name: float(value) for name, value in values.items()})
            for values in ticket.payload
        )

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        return ()

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        return

    def keep(self, rows: Sequence[int]) -> None:
        return

    def revert(self, rows: Sequence[int]) -> None:
        return

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        return (JobState(Cursor(), {"returned": self.returned}),)

    def load(self, row: int, state: JobState) -> None:
        raise NotImplementedError("a loop of the user's own keeps its state to itself")

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        raise NotImplementedError("a loop of the user's own predicts nothing")

    def close(self) -> None:
        if isinstance(self._steps, Iterator) and (close := getattr(self._steps, "close", None)):
            with self._ambient.inside():
                close()


class LoopAdapter(Adapter):
    """Loops of the user's own. They cannot be stacked."""

    name = "loop"
    fuser = None

    def __init__(self, compile: str | bool = "auto") -> None:
        super().__init__(compile)
        self._returned: dict[Job, Any] = {}

    @classmethod
    def claims(cls, model: Any) -> bool:
        return isinstance(model, OwnLoop)

    def device(self, name: str) -> str:
        torch = sys.modules.get("torch")
        gpus = torch.cuda.device_count() if torch is not None else 0
        known = ["cpu", *(f"cuda:{i}" for i in range(gpus))]
        if name == "auto":
            return known[-1] if gpus == 1 else known[min(1, gpus)]
        place = "cuda:0" if name == "cuda" and gpus else name
        if place not in known:
            raise DeviceError(
                sentence(f"a device out of auto, {', '.join(known)}", repr(name), 'pass device="auto"')
            )
        return place

    def describe(self, job: Job) -> ModelSpec:
        course = Course(length=0, batch_size=0, epochs=sys.maxsize, streamed=True)
        return ModelSpec(
            str(job.name),
            self.name,
            (("loop", str(job.name)),),
            course,
            state_bytes=0 if job.budget is None else size(job.budget),  # nothing else says what a loop needs
            step_bytes=0,
        )

    def open(self, job: Job, device: str, plain: bool = False, exact: bool = False) -> LoopSession:
        return LoopSession(job, device)

    def absorb(self, job: Job, state: JobState) -> Trained:
        self._returned[job] = state.model["returned"]
        return self.trained(job)

    def trained(self, job: Job) -> Trained:
        return Trained(self._returned.get(job))

    def left(self, job: Job) -> JobState:
        return JobState(Cursor(), {"returned": self._returned.get(job)})
