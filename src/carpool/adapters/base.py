"""The interfaces everything hangs on: `Adapter`, `Session`, `FusedSession`, `Fuser`.

An adapter is all that carpool knows about one framework, and lives for one run. A session is a job, or a fused group of
jobs, on a device; its rows are its members. Executors loop, sessions step. A missing power is declared
(`fuser = None`), never guessed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from carpool import arrays, collector
from carpool.arrays import Array
from carpool.errors import FusionError, ModelError, described, sentence
from carpool.fidelity import Proof
from carpool.job import Job
from carpool.memory.estimate import Footprint
from carpool.planning.cursor import Chunk, Cursor, Stretch, Supply
from carpool.planning.holds import Hold
from carpool.planning.spec import ModelSpec
from carpool.planning.trials import Form, Trial

_SAVE = "save and load them yourself"


@dataclass(frozen=True)
class JobState:
    """A job's state, the same whatever the strategy: what to load to go on from here.

    `model` maps leaf names to arrays, `optimizer` leaf names to slots to arrays, `groups` are the optimizer's
    hyper-parameters by group, `scheduler` is the scheduler's own state.
    """

    cursor: Cursor
    model: Mapping[str, Any]
    optimizer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    scheduler: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Ticket:
    """A receipt for the chunk that was enqueued; `payload` is the session's own business.

    A session may enqueue fewer steps than it was asked for, and may be the one that knows that an epoch ended.
    """

    chunk: Chunk
    payload: Any
    final: bool = False
    """Whether its rows are through, whatever their courses say: a loop of the user's own knows its end when it is there."""


class MetricRow(NamedTuple):
    """Sums of one row's metrics over `samples`, weighted by batch size; `steps` is how many steps it took.

    `diverged` says that the row stopped in this chunk because its loss was not finite.
    """

    row: int
    steps: int
    samples: int
    sums: Mapping[str, float]
    diverged: bool = False


@dataclass(frozen=True)
class MetricColumns:
    """The same of many rows, column by column: what reads them need not look at every row."""

    rows: tuple[int, ...]
    steps: np.ndarray
    samples: np.ndarray
    sums: Mapping[str, np.ndarray]
    diverged: np.ndarray
    errors: Mapping[int, BaseException] = field(default_factory=dict)
    """What rows raised while the chunk ran: they took fewer steps, and take no more."""

    def __iter__(self) -> Iterator[MetricRow]:
        names, sums = list(self.sums), zip(*(column.tolist() for column in self.sums.values()), strict=True)
        columns = (self.rows, self.steps.tolist(), self.samples.tolist(), sums, self.diverged.tolist())
        for row, steps, samples, values, diverged in zip(*columns, strict=True):
            yield MetricRow(row, steps, samples, dict(zip(names, values, strict=True)), diverged)


class Reading(Protocol):
    """Metrics on their way from the device: `read` waits for them, `done` says whether it would."""

    def done(self) -> bool: ...

    def read(self) -> MetricColumns: ...


@dataclass(frozen=True)
class EpochColumns:
    """What rows showed in whole epochs that they all went through, as one: sums are [epochs, rows]."""

    rows: tuple[int, ...]
    epochs: int
    steps: int
    """Of a row, in an epoch."""
    samples: int
    sums: Mapping[str, np.ndarray]
    val_means: Mapping[str, np.ndarray] = field(default_factory=dict)


class Told(Protocol):
    """Whole epochs that a session was told at once, and went on with."""

    @property
    def stretch(self) -> Stretch:
        """As many of those that it was asked for as it took."""
        ...

    def done(self) -> bool:
        """Whether reading it would not wait."""
        ...

    def columns(self) -> EpochColumns | None:
        """What they showed; None where a row did not go through: then it is read chunk by chunk."""
        ...

    def tickets(self) -> Iterator[tuple[Ticket, Reading | None]]:
        """The same as if it had been told chunk after chunk, each with the validation that followed it."""
        ...


@dataclass(frozen=True)
class Check:
    """What shows that a fused step is its members' steps: of `checked` members, by steps or by traces. Made of nothing, it says that nothing was compared."""

    checked: int = 0
    max_difference: float = 0.0
    """Between steps that were run."""
    mismatch: str | None = None
    proof: Proof = Proof.STEPS

    @classmethod
    def of(cls, checks: Sequence[Check]) -> Check:
        """Several of steps as one."""
        worst = max((check.max_difference for check in checks), default=0.0)
        mismatch = next((check.mismatch for check in checks if check.mismatch is not None), None)
        return cls(sum(check.checked for check in checks), worst, mismatch)


@dataclass(frozen=True)
class Trained:
    """The user's own objects after training."""

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    value: Any = None
    """What there is beside them, for `Result.value`."""


class StepFailure(Exception):
    """Some rows raised inside `advance`. `tickets` cover the steps done before that, each of rows that did as many; the other rows can go on."""

    def __init__(self, tickets: Sequence[Ticket], errors: Mapping[int, BaseException]) -> None:
        super().__init__(f"rows {sorted(errors)} raised")
        self.tickets = tuple(tickets)
        self.errors = dict(errors)


class DeviceFull(Exception):
    """What a session was asked to do did not fit on its device.

    `tickets` cover the steps done before that, and the rows hold exactly their result; there are none where a row may hold half a step.
    """

    def __init__(self, tickets: Sequence[Ticket], error: BaseException) -> None:
        super().__init__(described(error))
        self.tickets = tuple(tickets)


class Unstackable(Exception):
    """A fused session cannot go on together, and no single row is to blame."""


class Servable(ABC):
    """What serving needs of a session: no job, no data, no optimizer."""

    @abstractmethod
    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any: ...

    @abstractmethod
    def close(self) -> None:
        """Gives every byte back."""


class Session(Servable):
    """A job, or a fused group of jobs, living on a device."""

    schedules: bool = False
    """Whether a scheduler of a member's steps at the end of an epoch, so that its metrics must be known at once."""

    note: str = ""
    """What whoever reads a member's result should know of how it ran."""

    in_flight: int = 2
    """Chunks that may be enqueued before the oldest one's metrics are read, while nothing is decided between them."""

    def turn(self) -> AbstractContextManager[object]:
        """What everything that is asked of the session happens in: its own stream, on a device that has streams."""
        return nullcontext()

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        """What rows with streamed courses can run now, or what their input raised; those whose input is on the way are left out.

        Rows that read one source are answered alike.
        """
        raise NotImplementedError(f"{type(self).__name__} has no streamed rows")

    def depth(self, row: int) -> tuple[int, int] | None:
        """How many batches of a streamed row are there, and how many may be."""
        return None

    @abstractmethod
    def advance(self, chunk: Chunk) -> Ticket:
        """Enqueues the chunk's steps without waiting for them."""

    def preparing(self, chunk: Chunk) -> Callable[[], bool] | None:
        """Whether a compiler is through with the chunk's steps and the validation behind them; None where none is at work on them.

        Other sessions may go on meanwhile.
        """
        return None

    def advance_epochs(self, stretch: Stretch) -> Told | None:
        """Enqueues whole epochs at once, as many of these as it likes, their validation included; None where it takes no stretch."""
        return None

    def done(self, ticket: Ticket) -> bool:
        """Whether `metrics` would not have to wait."""
        return True

    def busy_s(self) -> float | None:
        """Seconds of device time used so far, where the session measures them."""
        return None

    @abstractmethod
    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...] | MetricColumns:
        """Waits for the chunk; one row of sums for each member in it."""

    @abstractmethod
    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        """Runs these rows' validation data; rows without any are left out."""

    def begin_evaluating(self, rows: Sequence[int]) -> Reading | None:
        """Enqueues what `evaluate` computes, of the rows as the steps enqueued so far leave them; None where it can only be waited for."""
        return None

    @abstractmethod
    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> Mapping[str, float] | None:
        """Tells a row that its epoch ended, with its metrics: a scheduler that steps by epoch steps now.

        What it gives back belongs to the epoch's metrics too.
        """

    def wants_to_stop(self, row: int) -> bool:
        """Whether something of the row's own, such as its framework's callbacks, ends its training after this epoch."""
        return False

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Remembers these rows' weights as their best."""

    @abstractmethod
    def revert(self, rows: Sequence[int]) -> None:
        """Puts the remembered weights back."""

    def restored(self, row: int) -> int | None:
        """The epoch, counted from 0, whose weights something of the row's own, such as its framework's callbacks, has put back."""
        return None

    @abstractmethod
    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]: ...

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        """The last states of rows that go. They may be the live objects themselves: nothing steps them any more."""
        return self.state(rows)

    @abstractmethod
    def load(self, row: int, state: JobState) -> None: ...

    def peak_bytes(self) -> int | None:
        """The most device memory this session held, where the device says."""
        return None


class FusedSession(Session):
    """Many jobs of one structure with stacked weights; rows are members."""

    width: int

    @abstractmethod
    def check(self, chunk: Chunk, rows: Sequence[int]) -> Check:
        """Holds the chunk's first step against each row's step alone, and leaves no trace of either."""

    def trial(self, chunk: Chunk) -> Trial | None:
        """Measures a launch of the chunk beside a member's step alone, and leaves no trace; None where it cannot tell."""
        return None

    @abstractmethod
    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        """These rows end: their last states. The rows are free until `join`."""

    @abstractmethod
    def join(self, row: int, job: Job, state: JobState | None = None) -> None:
        """A job of the same structure takes a free row; nothing is recompiled, no neighbour changes."""

    @abstractmethod
    def copy(self, source: int, target: int) -> None:
        """Gives `target` the weights and optimizer state of `source`."""

    @abstractmethod
    def resize(self, width: int) -> Mapping[int, int]:
        """Repacks the members to a narrower stack; where each old row went."""

    @abstractmethod
    def disturbed(self, row: int) -> str | None:
        """What of the user's own objects was changed behind the stack's back since the row came in, or None."""

    @abstractmethod
    def abandon(self) -> None:
        """The group gives up: the user's objects are as they were at the start, but for rows that have left."""

    @abstractmethod
    def timing(self) -> tuple[float, float]:
        """Seconds a launch takes, and seconds it took to prepare one (trace, compile, capture)."""


Prepared = Callable[[int, int, Form, float], None]
"""Called when a step was prepared: batch size, width, how it runs, seconds."""


class Fuser(ABC):
    """The power to stack jobs of one structure."""

    @abstractmethod
    def refusal(self, jobs: Sequence[Job]) -> str | None:
        """Why these jobs of one signature can't be stacked, or None."""

    def footprint(self, jobs: Sequence[Job]) -> Footprint | None:
        """What a stack of these jobs takes on the device, measured; None where it cannot be."""
        return None

    def tried(self, jobs: Sequence[Job], measure: bool = False) -> Trial | None:
        """What such a stack gains on this device: remembered, or measured now if asked, without a trace; None where that is not known."""
        return None

    @abstractmethod
    def open(self, jobs: Sequence[Job], width: int, device: str, prepared: Prepared) -> FusedSession: ...


class Adapter(ABC):
    """All that carpool knows about one framework, for one run."""

    name: ClassVar[str]
    fuser: Fuser | None
    has_callbacks: ClassVar[bool] = False
    """Whether its framework has callbacks, objects that its sessions call at its moments."""

    def is_full(self, error: BaseException) -> bool:
        """Whether an error says that a device has no memory left."""
        return isinstance(error, MemoryError | DeviceFull)

    def free(self) -> None:
        """Gives memory that garbage holds, or the framework keeps for later, back to the device."""
        collector.collect()

    def __init__(self, compile: str | bool = "auto") -> None:
        self.compile = compile

    @classmethod
    @abstractmethod
    def claims(cls, model: Any) -> bool:
        """Whether this object is a model of this framework."""

    @abstractmethod
    def device(self, name: str) -> str:
        """The device meant by "auto", "cpu", "cuda" or "cuda:N"; raises DeviceError for one that is not there."""

    def expect(self, jobs: Sequence[Job]) -> None:
        """All jobs that will be described, before the first is: what they have in common can be made at once."""
        return

    @abstractmethod
    def describe(self, job: Job) -> ModelSpec:
        """Builds what the job's factories make and says what the planner needs to know."""

    @abstractmethod
    def open(self, job: Job, device: str, plain: bool = False, exact: bool = False) -> Session:
        """A session for the job alone. `plain`: in its framework's ordinary way, nothing traced or captured.

        `exact`: nor is anything of the user's exchanged for what computes the same faster.
        """

    def outlook(self, jobs: Sequence[Job], strategy: str) -> str:
        """What a plan should say of how the steps of a group will run, if anything."""
        return ""

    def code(self, jobs: Sequence[Job], strategy: str) -> str:
        """The source of a group's training step as machine code, or a comment that says why there is none; "" where it is never that."""
        return ""

    @abstractmethod
    def absorb(self, job: Job, state: JobState) -> Trained:
        """Writes a state into the user's own objects and gives them back."""

    @abstractmethod
    def trained(self, job: Job) -> Trained:
        """The user's own objects as they are."""

    def left(self, job: Job) -> JobState:
        """What the user's own objects hold, on the host: what a worker hands over."""
        raise ModelError(
            sentence(
                "models that carpool can hand over from a worker",
                f"{self.name} models",
                'pass strategy="auto"',
            )
        )

    def keeps_shares(self) -> bool:
        """Whether jobs that have a share of the device's processors can keep it in this process."""
        return False

    def environment(self, jobs: Sequence[Job]) -> Mapping[str, str]:
        """Variables that a worker needs for these jobs before it imports anything."""
        return {}

    def hold(self, job: Job, measure: bool) -> Hold | None:
        """How much of the job's step holds Python's lock: remembered, or measured now if asked; None where that is not known."""
        return None

    def weights(self, model: Any) -> Mapping[str, Array]:
        """A model's weights by name, in an order that its structure decides."""
        raise ModelError(sentence("models with weights that carpool can save", f"{self.name} models", _SAVE))

    def load_weights(self, model: Any, weights: Mapping[str, Array]) -> Any:
        """The model with these weights: the same object where it can be changed. Raises ModelError where they do not fit."""
        raise ModelError(sentence("models that carpool can give weights", f"{self.name} models", _SAVE))

    def optimizer_state(self, model: Any, optimizer: Any, scheduler: Any) -> Any:
        """What optimizer and scheduler hold: a nest of plain values and `Array`s, or None."""
        return None

    def load_optimizer(self, model: Any, optimizer: Any, scheduler: Any, state: Any) -> Any:
        """The optimizer with that state: the same object where it can be changed."""
        raise ModelError(sentence("optimizers that carpool can give a state", f"{self.name}'s", _SAVE))

    def save(self, model: Any, path: Path) -> None:
        """Writes a model's weights as safetensors."""
        arrays.write(path, self.weights(model))

    def close(self) -> None:
        """The run is over: threads and whatever else `describe` opened are stopped."""
        return

    def predict(self, models: Sequence[Any], inputs: Any, batch_size: int | None, device: str) -> list[Any]:
        """Each model's outputs for the same inputs, in evaluation mode."""
        raise ModelError(
            sentence("models that carpool can predict with", f"{self.name} models", "call them yourself")
        )

    def stack(
        self, models: Sequence[Any], optimizers: Sequence[Any], seeds: Sequence[int], compile: bool
    ) -> Any:
        """Models of one structure, stacked for a loop of the user's own: what `carpool.Stack` stands on."""
        raise FusionError(
            sentence("models that carpool can stack", f"{self.name} models", "train them one by one")
        )
