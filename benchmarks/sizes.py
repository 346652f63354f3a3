"""What a run is made of: rows, cold calls and the mix, each with the words that `--rows` has for it, and where it computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """One row: how many models of which structure, and for how many epochs in a window of carpool's.

    `calls` windows of carpool's are enough, each cut in parts once it is open. `takes_s` is what the row took on an H200: with less left it does not begin.
    """

    workload: str
    members: int
    epochs: int
    calls: int | None = None
    takes_s: float = 60.0

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.workload, f"{self.workload}:{self.members}"})

    @property
    def title(self) -> str:
        return f"{self.members} × {self.workload}"


@dataclass(frozen=True)
class ColdSize:
    """How many models of which structure, for how many steps, from nothing."""

    workload: str
    members: int
    steps: int
    takes_s: float = 45.0

    @property
    def names(self) -> frozenset[str]:
        return frozenset({"cold", f"cold:{self.workload}", f"cold:{self.workload}:{self.steps}"})

    @property
    def title(self) -> str:
        return f"{self.members} × {self.workload}, {self.steps} steps from nothing"


@dataclass(frozen=True)
class MixSize:
    """Different models together; an eager loop takes so many seconds for each."""

    worth_s: float
    takes_s: float = 110.0
    names = frozenset({"mix"})
    title = "the mix"


@dataclass(frozen=True)
class Setting:
    """Where and how a run computes."""

    device: str
    compile: str | bool
    precision: str
