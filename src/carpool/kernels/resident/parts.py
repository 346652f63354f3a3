"""What a step of one member is made of: its statements, and where its arrays come from and go to."""

from __future__ import annotations

from dataclasses import dataclass, field

from carpool.kernels.resident.loops import SIZES, Array, Statement, Type


@dataclass(frozen=True)
class Home:
    """Where a kept array comes from when a launch begins, and goes to at its end: a row of a tensor."""

    array: Array
    tensor: str
    offset: int = 0
    """In elements, from where the member's row begins."""
    is_stored: bool = True
    is_turned: bool = False
    """Whether the array is a matrix that lies the other way round there."""


@dataclass(frozen=True)
class Batch:
    """Samples that are gathered before a step: where to, and from which tensor."""

    array: Array
    tensor: str
    bytes: int
    """Of a sample."""


@dataclass(frozen=True)
class Number:
    """A number of the step, read from [rows, steps, ...] at (row, step), or of [rows] if `per_step` is 0."""

    array: Array
    tensor: str
    offset: int = 0
    per_step: int = 0
    """How many numbers further the next step's lies."""


@dataclass(frozen=True)
class Counter:
    """A whole number of the step: a member's own, plus the steps that it or the launch took."""

    array: Array
    tensor: str
    adds: str = "R->from + k"


@dataclass(frozen=True)
class Output:
    """What a step leaves behind: copied to [rows, steps, ...] at (row, step) once its body has run."""

    array: Array
    tensor: str


@dataclass
class Step:
    """What one member's step does. `commit` changes what is kept; it runs where the loss is finite."""

    real: Type
    size: int
    vector_bytes: int
    homes: list[Home] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    commit: list[Statement] = field(default_factory=list)
    when_due: list[Statement] = field(default_factory=list)
    when_not: list[Statement] = field(default_factory=list)
    shown: Array | None = None
    outputs: list[Output] = field(default_factory=list)
    trains: bool = True
    spans: int = 0
    tensors: list[str] = field(default_factory=list)

    @property
    def lanes(self) -> int:
        """Of a vector of the weights' type."""
        return self.vector_bytes // SIZES[self.real]

    @property
    def told(self) -> set[Array]:
        """The arrays that are read when the statements are through."""
        shown = [] if self.shown is None else [self.shown]
        return {*shown, *(output.array for output in self.outputs)}


PARTS = ("body", "commit", "when_due", "when_not")
"""The lists of a step's statements."""
