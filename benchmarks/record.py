"""What a run measured, as frozen values that go to JSON and come back."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

OURS = "carpool"
Made = TypeVar("Made")
_DERIVED = (
    "model_steps_per_s",
    "steady_model_steps_per_s",
    "ratio_of_carpool",
    "ratio_of_carpool_once_open",
)


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

    `first` is its first call, whatever it compiles included; `first_step_s` of it had passed when the first steps were on
    their way. `steady` are parts of the windows once it is open (`pace.py`, `ours.Stopwatch`). `note` says what went wrong, or what else a reader must know.
    """

    way: str
    members: int
    first: Window | None = None
    windows: tuple[Window, ...] = ()
    steady: tuple[Window, ...] = ()
    first_step_s: float | None = None
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
    by_precision: float | None = None
    """How far the plain loop at the run's precision is from the plain loop in strict float32."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reached in this run: bytes a second of a large copy, read and written, and a large product's FLOPs."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Need:
    """What one model-step cannot do without."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class ColdCall:
    """One call in a fresh process: seconds to its first steps, and to its return."""

    first_step_s: float
    seconds: float


@dataclass(frozen=True)
class Cold:
    """A sweep from nothing, in processes of its own: nothing compiled before, then what the first left on disk.

    `eager_s` is what the same steps take one model after another, counted up from `eager_steps` that were run.
    """

    workload: str
    title: str
    members: int
    steps: int
    first: ColdCall | None = None
    again: ColdCall | None = None
    eager_s: float | None = None
    eager_steps: int = 0
    note: str = ""


@dataclass(frozen=True)
class Mix:
    """Different models together, a fixed number of steps each: seconds of every way, window by window.

    The score of a way is how long all of them take one after another in an eager loop, divided by its makespan.
    """

    steps: Mapping[str, int]
    eager_s: tuple[float, ...]
    makespans: Mapping[str, tuple[float, ...]]
    first_s: float

    def score(self, way: str) -> float:
        return statistics.median(self.eager_s) / self.seconds(way)

    def seconds(self, way: str) -> float:
        """The median window's."""
        return statistics.median(self.makespans[way])


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
    need: Need | None = None

    def way(self, name: str) -> Measured | None:
        return next((one for one in self.measured if one.way == name), None)

    def ratio(self, peer: str) -> float | None:
        """Our rate over the peer's, of whole warm calls."""
        ours, theirs = self.way(OURS), self.way(peer)
        if ours is None or theirs is None or ours.rate is None or theirs.rate is None:
            return None
        return ours.rate / theirs.rate

    def open_ratio(self, peer: str) -> float | None:
        """Our rate once open over the peer's."""
        ours, theirs = self.way(OURS), self.way(peer)
        if ours is None or theirs is None or ours.steady_rate is None or theirs.rate is None:
            return None
        return ours.steady_rate / theirs.rate

    def best(self, apart: Collection[str]) -> str | None:
        """The fastest peer that is not one of these."""
        rates = {one.way: one.rate for one in self.measured if one.rate and one.way not in (OURS, *apart)}
        return max(rates, key=lambda way: rates[way]) if rates else None

    def bound(self, ceilings: Ceilings | None) -> float | None:
        """The model-steps a second that a device with these ceilings cannot exceed."""
        if ceilings is None or self.need is None:
            return None
        return 1 / max(self.need.bytes / ceilings.bytes_per_s, self.need.flops / ceilings.flops_per_s)


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
    ceilings: Ceilings | None = None
    cold: tuple[Cold, ...] = ()
    mix: Mix | None = None

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
            entry["ratio_of_carpool_once_open"] = row.open_ratio(one.way)
        shown["bound_model_steps_per_s"] = row.bound(report.ceilings)
    if report.mix is not None:
        plain["mix"]["scores"] = {way: report.mix.score(way) for way in report.mix.makespans}
    return plain


def from_json(plain: Mapping[str, Any]) -> Report:
    """The inverse of `to_json`; older records lack what was not measured then."""
    return Report(
        **{
            **plain,
            "notes": tuple(plain["notes"]),
            "rows": tuple(_row(row) for row in plain["rows"]),
            "ceilings": _made(Ceilings, plain.get("ceilings")),
            "cold": tuple(_cold(one) for one in plain.get("cold", ())),
            "mix": _mix(plain["mix"]) if plain.get("mix") else None,
        }
    )


def _made(kind: type[Made], plain: Mapping[str, Any] | None) -> Made | None:
    return kind(**plain) if plain else None


def _row(plain: Mapping[str, Any]) -> Row:
    kept = {name: value for name, value in plain.items() if name != "bound_model_steps_per_s"}
    kept["measured"] = tuple(_measured(one) for one in plain["measured"])
    kept["fidelity"] = _made(Fidelity, plain["fidelity"])
    kept["need"] = _made(Need, plain.get("need"))
    return Row(**kept)


def _cold(plain: Mapping[str, Any]) -> Cold:
    calls = {name: _made(ColdCall, plain[name]) for name in ("first", "again")}
    return Cold(**{**plain, **calls})


def _mix(plain: Mapping[str, Any]) -> Mix:
    makespans = {way: tuple(seconds) for way, seconds in plain["makespans"].items()}
    return Mix(plain["steps"], tuple(plain["eager_s"]), makespans, plain["first_s"])


def _measured(plain: Mapping[str, Any]) -> Measured:
    kept = {name: value for name, value in plain.items() if name not in _DERIVED}
    for name in ("windows", "steady"):
        kept[name] = tuple(Window(**window) for window in kept[name])
    kept["first"] = Window(**kept["first"]) if kept["first"] else None
    return Measured(**kept)


def _median_rate(windows: tuple[Window, ...]) -> float | None:
    return statistics.median(window.rate for window in windows) if windows else None
