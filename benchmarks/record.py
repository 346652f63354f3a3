"""What a run measured, as frozen values that go to JSON and come back."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "carpool"


@dataclass(frozen=True)
class Window:
    """One timed stretch of training; `model_steps` are steps summed over the models that took them."""

    seconds: float
    model_steps: int

    @property
    def rate(self) -> float:
        return self.model_steps / self.seconds


@dataclass(frozen=True)
class Measured:
    """One way to train, in one row. `members` is how many models it trained: fewer than the row's when sampled.

    `first` is its first call, whatever it compiles included. `steady` are the parts of the windows after
    opening: from the end of the first check to the last epoch's end. `note` says what went wrong, or what else a reader must know.
    """

    way: str
    members: int
    first: Window | None = None
    windows: tuple[Window, ...] = ()
    steady: tuple[Window, ...] = ()
    peak_bytes: int | None = None
    note: str = ""

    @property
    def rate(self) -> float | None:
        """Model-steps a second: the median window's."""
        return _median_rate(self.windows)

    @property
    def steady_rate(self) -> float | None:
        return _median_rate(self.steady)

    @property
    def seconds(self) -> float | None:
        """The median window's wall time."""
        return statistics.median(window.seconds for window in self.windows) if self.windows else None


@dataclass(frozen=True)
class Fidelity:
    """How far sampled members are from the plain loop's: same seeds, batches and hyper-parameters."""

    members: int
    steps: int
    max_difference: float
    max_weight: float


@dataclass(frozen=True)
class Row:
    """Models of one structure trained every way."""

    workload: str
    title: str
    members: int
    batch_size: int
    steps: int
    measured: tuple[Measured, ...]
    fidelity: Fidelity | None = None

    def way(self, name: str) -> Measured | None:
        return next((one for one in self.measured if one.way == name), None)

    def ratio(self, peer: str) -> float | None:
        """Our rate over the peer's, of whole warm calls."""
        ours, theirs = self.way(OURS), self.way(peer)
        if ours is None or theirs is None or ours.rate is None or theirs.rate is None:
            return None
        return ours.rate / theirs.rate


@dataclass(frozen=True)
class Report:
    """A whole run: where, with what, and its rows."""

    kind: str
    date: str
    quick: bool
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    rows: tuple[Row, ...] = field(default_factory=tuple)

    @property
    def ways(self) -> tuple[str, ...]:
        """Every way that any row has, ours last."""
        names = dict.fromkeys(one.way for row in self.rows for one in row.measured)
        return (*(name for name in names if name != OURS), *(name for name in names if name == OURS))


def to_json(report: Report) -> dict[str, Any]:
    """Plain data; medians and ratios are written beside the windows for readers who have no Python."""
    plain = asdict(report)
    for row, shown in zip(report.rows, plain["rows"], strict=True):
        for one, entry in zip(row.measured, shown["measured"], strict=True):
            entry["model_steps_per_s"] = one.rate
            entry["steady_model_steps_per_s"] = one.steady_rate
            entry["ratio_of_carpool"] = row.ratio(one.way)
    return plain


def from_json(plain: Mapping[str, Any]) -> Report:
    """The inverse of `to_json`."""
    rows = tuple(_row(row) for row in plain["rows"])
    return Report(**{**plain, "notes": tuple(plain["notes"]), "rows": rows})


def _row(plain: Mapping[str, Any]) -> Row:
    fidelity = Fidelity(**plain["fidelity"]) if plain["fidelity"] else None
    return Row(
        **{**plain, "measured": tuple(_measured(one) for one in plain["measured"]), "fidelity": fidelity}
    )


def _measured(plain: Mapping[str, Any]) -> Measured:
    derived = ("model_steps_per_s", "steady_model_steps_per_s", "ratio_of_carpool")
    kept = {name: value for name, value in plain.items() if name not in derived}
    for name in ("windows", "steady"):
        kept[name] = tuple(Window(**window) for window in kept[name])
    kept["first"] = Window(**kept["first"]) if kept["first"] else None
    return Measured(**kept)


def _median_rate(windows: tuple[Window, ...]) -> float | None:
    return statistics.median(window.rate for window in windows) if windows else None
