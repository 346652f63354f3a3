"""What happened, in the past tense: frozen, typed, sent one way to the reporters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from carpool.fidelity import Proof
from carpool.planning.plan import Plan
from carpool.planning.trials import Form, Trial
from carpool.result import Outcome


@dataclass(frozen=True)
class PreparationBegan:
    """Something before the first step began that may take a while: `what` says what is being waited for."""

    what: str


@dataclass(frozen=True)
class RunStarted:
    """Planning is over; `steps` are the training steps of all jobs together."""

    plan: Plan
    device: str
    steps: int


@dataclass(frozen=True)
class GroupStarted:
    """A group's session is about to be opened. `group` is its position in the plan."""

    group: int
    names: tuple[str, ...]
    strategy: str


@dataclass(frozen=True)
class GroupCompiled:
    """A group's step for one batch size was made ready to run: as it was traced, compiled, or as machine code ("resident")."""

    group: int
    batch_size: int
    width: int
    form: Form
    seconds: float

    @property
    def compiled(self) -> bool:
        """Whether it is more than traced."""
        return self.form != "traced"


@dataclass(frozen=True)
class GroupVerified:
    """A fused step was held against the steps of these many members, before it counted, and they agreed.

    `proof` says how. `max_difference` is between steps that were run: where traces were compared, none was.
    """

    group: int
    checked: int
    max_difference: float
    proof: Proof = Proof.STEPS


@dataclass(frozen=True)
class GroupTried:
    """A fused group's step was timed beside a member's step alone, or such a trial was remembered."""

    group: int
    trial: Trial


@dataclass(frozen=True)
class GroupFellBack:
    """A fused group could not go on together; its remaining members start again, each alone."""

    group: int
    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class GroupResized:
    """A fused group was repacked to a narrower stack because that pays."""

    group: int
    old_width: int
    new_width: int


@dataclass(frozen=True)
class GroupAdvanced:
    """Training steps were enqueued: `steps` counts them over the members."""

    group: int
    steps: int


@dataclass(frozen=True)
class GroupEnded:
    """A group's session was closed `seconds` after it was opened; it had used the device for `busy_s` of them.

    On a GPU, where sessions run at the same time, these overlap with what the others used.
    """

    group: int
    names: tuple[str, ...]
    seconds: float
    busy_s: float


@dataclass(frozen=True)
class BatchesRead:
    """A streamed job used up so many batches; `depth` of at most `capacity` more were there already."""

    name: str
    batches: int
    depth: int
    capacity: int


@dataclass(frozen=True)
class JobAdmitted:
    """A job's memory was counted and it joined a group."""

    name: str
    group: int
    bytes: int


@dataclass(frozen=True)
class EpochEnded:
    """One job finished an epoch (counted from 0); `metrics` is that epoch's row of its history."""

    name: str
    epoch: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class EpochsEnded:
    """An epoch ended for all of these jobs at once, for each its own: columns in the order of their names.

    Whoever names it among what it `hears` gets it in place of as many `EpochEnded`, wherever nothing is decided between epochs.
    """

    names: tuple[str, ...]
    epochs: np.ndarray
    metrics: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class JobFailed:
    """A job raised; the others go on."""

    name: str
    error: BaseException


@dataclass(frozen=True)
class JobEnded:
    """A job reached its outcome after `steps` training steps.

    `held` are the metrics of the weights that it holds, where these are not its last epoch's.
    """

    name: str
    outcome: Outcome
    steps: int
    held: Mapping[str, float] | None = None


@dataclass(frozen=True)
class RunEnded:
    """Every job has an outcome."""

    seconds: float


Event = (
    PreparationBegan
    | RunStarted
    | GroupStarted
    | GroupCompiled
    | GroupVerified
    | GroupTried
    | GroupFellBack
    | GroupResized
    | GroupAdvanced
    | GroupEnded
    | BatchesRead
    | JobAdmitted
    | EpochEnded
    | EpochsEnded
    | JobFailed
    | JobEnded
    | RunEnded
)
Emit = Callable[[Event], None]


def hears(listener: object, kind: type) -> bool:
    """Whether a listener wants such events. One that names what it `hears` wants no others; one that does not wants all.

    >>> hears(print, EpochEnded)
    True
    """
    named = getattr(listener, "hears", None)
    return named is None or kind in named
