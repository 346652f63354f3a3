"""What carpool gains on the machine it is on: an eager loop, torch.func's vmap compiled, and `carpool.train`, in one run.

What it compares is in `peers.py`. The repository's `benchmarks` are the long version: more structures, more peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median

import carpool
from carpool.errors import OptionError, sentence
from carpool.peers import BATCH_SIZE, SAMPLES, STRUCTURES, Ours, Structure, Vmapped, drawn, eager, jobs_of

EAGER, VMAPPED, OURS = "eager loop", "vmap + compile", "carpool"
_SAMPLED = 2  # models that the eager loop trains: a model's step takes as long whatever follows


@dataclass(frozen=True)
class Timed:
    """One way: its rate once warm (of carpool, of whole calls), and what its first call took, compiling included.

    `models` were trained; `whole_s` is how long all models take at that rate. `note` says why there is no figure.
    """

    structure: str
    way: str
    models: int
    model_steps_per_s: float | None = None
    first_call_s: float | None = None
    first_step_s: float | None = None
    whole_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was measured."""

    device: str
    jobs: int
    windows: int
    timed: tuple[Timed, ...]

    def ratio(self, one: Timed) -> float | None:
        """How many times faster a whole warm call of carpool is."""
        ours = next((own for own in self.timed if (own.structure, own.way) == (one.structure, OURS)), None)
        if ours is None or not ours.model_steps_per_s or not one.model_steps_per_s:
            return None
        return ours.model_steps_per_s / one.model_steps_per_s

    def ratios(self) -> dict[str, dict[str, float | None]]:
        """The same for every structure and peer."""
        found: dict[str, dict[str, float | None]] = {}
        for one in self.timed:
            if one.way != OURS:
                found.setdefault(one.structure, {})[one.way] = self.ratio(one)
        return found

    def describe(self) -> str:
        """The table."""
        heads = ("", "model-steps/s", f"{self.jobs} models", "first call", "first step", "carpool ÷")
        lines = [_line(heads)]
        for title in dict.fromkeys(one.structure for one in self.timed):
            lines.append(title)
            lines += [_line(self._cells(one)) for one in self.timed if one.structure == title]
        return "\n".join([*lines, "", *_notes(self)])

    def _cells(self, one: Timed) -> tuple[str, ...]:
        if one.model_steps_per_s is None:
            return f"  {one.way}", one.note, "", "", "", ""
        ratio = self.ratio(one)
        return (
            f"  {one.way}",
            f"{one.model_steps_per_s:,.0f}",
            _seconds(one.whole_s),
            _seconds(one.first_call_s),
            _seconds(one.first_step_s),
            f"{ratio:.2f}" if ratio and one.way != OURS else "",
        )


def run(
    jobs: int = 64,
    windows: int = 3,
    device: str = "auto",
    *,
    structures: Sequence[Structure] | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Every way in turns, window by window, structure after structure."""
    _check_torch()
    timed: list[Timed] = []
    place = device
    for structure in structures or STRUCTURES:
        data = drawn(structure)
        place = carpool.plan(jobs_of(structure, data, 1), device=device).device
        say(f"{jobs} × {structure.title} on {place}")
        x, y = (part.to(place) for part in data)
        few, ours = min(_SAMPLED, jobs), Ours(partial(jobs_of, structure, (x, y), jobs), place)
        ways = [
            _Way(EAGER, few, partial(eager, structure, x, y, few)),
            _Way(VMAPPED, jobs, Vmapped(structure, x, y, jobs)),
            _Way(OURS, jobs, ours),
        ]
        for number in range(windows + 1):
            for way in ways:
                way.take(is_first=not number)
        all_steps = jobs * structure.epochs * (SAMPLES // BATCH_SIZE)
        timed += [way.timed(structure.title, all_steps, ours.first_step_s) for way in ways]
    return Report(place, jobs, windows, tuple(timed))


class _Way:
    """One way at one structure: its windows so far. Its first, which builds and compiles, is kept apart."""

    def __init__(self, name: str, models: int, train: Callable[[], int]) -> None:
        self._name, self._models, self._train = name, models, train
        self._first_s: float | None = None
        self._rates: list[float] = []
        self._note = ""

    def take(self, is_first: bool) -> None:
        """One window. A peer that fails, for want of a compiler or of memory, says so from then on."""
        if self._note:
            return
        started = time.perf_counter()
        try:
            steps = self._train()
        except Exception as error:
            if self._name == OURS:
                raise
            self._note = f"failed: {type(error).__name__}"
            return
        seconds = time.perf_counter() - started
        if is_first:
            self._first_s = seconds
        else:
            self._rates.append(steps / seconds)

    def timed(self, structure: str, all_steps: int, first_step_s: float | None) -> Timed:
        rate = median(self._rates) if self._rates and not self._note else None
        return Timed(
            structure,
            self._name,
            self._models,
            rate,
            first_call_s=self._first_s if self._name != EAGER else None,
            first_step_s=first_step_s if self._name == OURS else None,
            whole_s=all_steps / rate if rate else None,
            note=self._note,
        )


def _check_torch() -> None:
    if find_spec("torch") is None:
        raise OptionError(
            sentence("torch for the benchmark", "an environment without it", "pip install 'carpool[torch]'")
        )


# Words


def _notes(report: Report) -> list[str]:
    return [
        f"Medians of {report.windows} window{'s' if report.windows > 1 else ''} in which the ways take turns. carpool's is a whole warm call of carpool.train, the",
        f"eager loop's {_SAMPLED} models from seeds to trained weights, vmap's steps alone, once compiled. carpool ÷: how many times faster.",
    ]


def _line(cells: Sequence[str]) -> str:
    first, second, *rest = cells
    return (f"{first:<18}{second:>16}" + "".join(f"{cell:>12}" for cell in rest)).rstrip()


def _seconds(value: float | None) -> str:
    return f"{value:,.1f} s" if value is not None else ""
