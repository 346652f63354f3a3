"""What became of the jobs: `Result` for one, `Results` for all of them."""

from __future__ import annotations

import enum
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, overload

import numpy as np

from carpool.arguments import Arguments
from carpool.errors import FileError, OptionError, meant, printable, sentence
from carpool.stopping import check_mode, direction


class Outcome(enum.Enum):
    """How a job ended; each value is its own sentence."""

    COMPLETED = "ran all its epochs"
    STOPPED = "stopped early: its metric no longer improved"
    DIVERGED = "its loss turned NaN or infinite; it holds the state before that step"
    FAILED = "raised an error"
    OUT_OF_MEMORY = "did not fit on the device, even alone; it holds what it had reached"
    INTERRUPTED = "was interrupted; it holds what it had reached"

    @property
    def word(self) -> str:
        return self.name.lower()


UNSOUND = (Outcome.FAILED, Outcome.OUT_OF_MEMORY, Outcome.DIVERGED)
_FIRST = ("name", "outcome", "steps", "epoch")


@dataclass(frozen=True)
class Files:
    """Where a result that was read from a folder has its arrays; None where it has none."""

    weights: Path | None
    optimizer: Path | None


@dataclass(frozen=True)
class Result:
    """One job's end: outcome, history, the trained objects, and what it took.

    `seconds` is the wall time from the start of its group to its own end. `peak_bytes` is the group's peak device memory (a fused
    group shares it), or None where the device does not say.
    """

    name: str
    outcome: Outcome
    config: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    error: BaseException | None = None
    steps: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    strategy: str = ""
    reason: str = ""
    value: Any = None
    """What a function given to `carpool.map` returned; of a Keras job of another backend its weights, as arrays."""
    epoch: int | None = None
    """The epoch, counted from 0, at whose end the weights were what the model holds: the best one's where these were put back.

    None where they are of no epoch's end: training ended within one, or the model is as it came.
    """
    held: Mapping[str, float] | None = None
    """The metrics of the weights that the model holds, as far as they were measured; None: the last of the history."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Which way metrics are better ("min" or "max"), where the job's early stopping says so."""
    saved: Files | None = field(default=None, repr=False, compare=False)
    """Where its arrays are, if it was read from a folder."""

    def last(self, metric: str) -> float:
        """The metric after the last epoch; NaN where there is none."""
        values = self.history.get(metric)
        return values[-1] if values else math.nan

    def metric(self, name: str) -> float:
        """The metric of the weights that the model holds, by which `best` and tables rank; NaN where it is not known.

        Of weights within an epoch it is the last that was measured before them.

        >>> stopped = Result("a", Outcome.STOPPED, history={"loss": [0.5, 0.25, 0.75]}, epoch=1, held={"loss": 0.25})
        >>> stopped.metric("loss"), stopped.last("loss")
        (0.25, 0.75)
        """
        return self.last(name) if self.held is None else self.held.get(name, math.nan)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name, as arrays: the model's, or of results that were read from a folder the saved ones."""
        from carpool.saving import weights_of

        return {name: array.numpy() for name, array in weights_of(self).items()}

    @property
    def optimizer_state(self) -> Any:
        """What the optimizer and scheduler hold, as a nest of plain values and arrays; None where there is none."""
        from carpool.saving import optimizer_of, plain

        return plain(optimizer_of(self))

    def load_into(self, model: Any, optimizer: Any = None, scheduler: Any = None) -> Any:
        """Gives a model of the same structure these weights and returns it: the same object where that can be changed, else one like it.

        With an optimizer (and scheduler), which get the state that theirs had, it returns the model and the optimizer.
        """
        from carpool.saving import loaded

        return loaded(self, model, optimizer, scheduler)

    @property
    def is_sound(self) -> bool:
        """Whether it can be the best: it neither failed nor diverged."""
        return self.outcome not in UNSOUND

    @property
    def is_restored(self) -> bool:
        """Whether the model holds the weights of an epoch before the last."""
        return self.epoch is not None and self.epoch + 1 < max(map(len, self.history.values()), default=0)


class Results(Sequence[Result]):
    """The results in the order of the jobs; also by name, as a table and as a frame.

    >>> done = Results([Result("a", Outcome.COMPLETED, history={"loss": [0.5]})])
    >>> done["a"].outcome.word, done.best("loss").name
    ('completed', 'a')
    """

    def __init__(self, results: Sequence[Result], seconds: float = 0.0) -> None:
        self._results = tuple(results)
        self._by_name = {result.name: result for result in self._results}
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, key: int | str) -> Result: ...
    @overload
    def __getitem__(self, key: slice) -> Results: ...
    def __getitem__(self, key: int | str | slice) -> Result | Results:
        if isinstance(key, slice):
            return Results(self._results[key], self.seconds)
        if not isinstance(key, str):
            return self._results[key]
        if key not in self._by_name:
            raise KeyError(sentence("the name of a job", repr(key), f"use one of {_few(self._by_name)}"))
        return self._by_name[key]

    @property
    def failed(self) -> Results:
        """The jobs that raised, diverged or did not fit."""
        return Results([result for result in self._results if not result.is_sound], self.seconds)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that any job has, in the order first seen."""
        return tuple(dict.fromkeys(name for result in self._results for name in result.history))

    def best(self, metric: str = "val_loss", mode: str = "auto") -> Result:
        """The result whose weights have the best value of `metric`; diverged and failed jobs never are.

        `mode` says whether lower ("min") or higher ("max") is better; "auto" takes that from the jobs' early stopping, or from the
        metric's name where it is a usual one. The value is that of the weights the model holds, `result.metric(metric)`.
        """
        ranked = self._ranked(metric, mode)
        if not ranked:
            raise OptionError(
                sentence(f"a job with a finite {metric}", "none", "see results.failed for what went wrong")
            )
        return ranked[0]

    def _ranked(self, metric: str, mode: str = "auto") -> list[Result]:
        if metric not in self.metrics:
            raise OptionError(
                sentence(
                    f"one of the metrics {_few(self.metrics)}",
                    repr(metric),
                    self._nearest(metric),
                )
            )
        said = {result.modes[metric] for result in self._results if metric in result.modes}
        way = direction(metric, said.pop() if mode == "auto" and len(said) == 1 else mode)
        sign = -1.0 if way == "max" else 1.0
        sound = [result for result in self._results if result.is_sound and _is_finite(result.metric(metric))]
        return sorted(sound, key=lambda result: sign * result.metric(metric))

    def _nearest(self, metric: Any) -> str:
        """What to do about a metric that no job has."""
        bare = metric.removeprefix("val_") if isinstance(metric, str) else metric
        near = meant(metric, self.metrics) or meant(bare, self.metrics)
        if bare != metric and not any(name.startswith("val_") for name in self.metrics):
            return f"pass validation_data=, or {near or 'name one of these'}"
        return near or "name one of these, or add it to metrics="

    def rows(
        self, sort: str | None = None, top: int | None = None, mode: str = "auto"
    ) -> list[dict[str, Any]]:
        """One plain mapping a job: the metrics are those of the weights it holds, `epoch` counts from 0.

        Sorted by a metric, best first, unsound jobs last; `mode` as for `best`.
        """
        top = None if top is None else Arguments().whole("top", top, "pass how many rows, or None", 0)
        check_mode(mode)
        chosen = list(self._results)
        if sort is not None:
            ranked = self._ranked(sort, mode)
            places = {id(result) for result in ranked}
            chosen = ranked + [result for result in chosen if id(result) not in places]
        return [
            dict(zip(self._columns, _cells(result, self.metrics), strict=True)) for result in chosen[:top]
        ]

    def table(self, sort: str | None = None, top: int | None = None, mode: str = "auto") -> str:
        """The results as aligned text; the columns are those of `rows`.

        >>> print(Results([Result("a", Outcome.COMPLETED, history={"loss": [0.5]}, steps=3, epoch=0)]).table())
        name  outcome    steps  epoch  loss
        a     completed  3      0      0.5
        """
        head = [printable(name) for name in self._columns]
        lines = [head, *([_cell(value) for value in row.values()] for row in self.rows(sort, top, mode))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        ]
        return "\n".join(line.rstrip() for line in text)

    @property
    def _columns(self) -> tuple[str, ...]:
        taken = {name: f"{name} (metric)" for name in _FIRST}
        return (*_FIRST, *(taken.get(name, name) for name in self.metrics))

    def frame(self) -> Any:
        """A pandas DataFrame, one row a job: its config, outcome and the metrics of the weights it holds."""
        import pandas

        told = [
            {**row, "seconds": result.seconds, "strategy": result.strategy}
            for row, result in zip(self.rows(), self._results, strict=True)
        ]
        rows = [
            {**{f"config.{key}" if key in row else key: value for key, value in result.config.items()}, **row}
            for row, result in zip(told, self._results, strict=True)
        ]
        return pandas.DataFrame(rows, columns=None if rows else ["name"]).set_index("name")

    def save(self, folder: str | Path) -> Path:
        """Writes `results.json`, and the weights and optimizer states of the jobs (safetensors), into `folder`: `carpool.load` reads them.

        An earlier save there is replaced at once, when all that is new is written. Where that fails, as on a full disk, it stays as it was, and
        the error carries these `results`. What a `Loop` or a function returned is left out unless it is a model.
        """
        from carpool.saving import save

        return save(self, Arguments(FileError).path("a folder", folder, 'pass results.save("results")'))

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for result in self._results:
            counts[result.outcome.word] = counts.get(result.outcome.word, 0) + 1
        return f"Results({len(self)} jobs: {', '.join(f'{n} {word}' for word, n in counts.items())}; {self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        """A notebook's table: the first hundred jobs, the count of the rest."""
        shown = self.rows(top=100)
        head = "".join(f"<th>{html.escape(printable(name))}</th>" for name in self._columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>"
            for row in shown
        )
        rest = f"<p>and {len(self) - len(shown)} more</p>" if len(self) > len(shown) else ""
        return f"<p>{html.escape(repr(self))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _cells(result: Result, metrics: Sequence[str]) -> tuple[Any, ...]:
    first = (result.name, result.outcome.word, result.steps, result.epoch)
    return (*first, *(result.metric(name) for name in metrics))


def _is_finite(value: Any) -> bool:
    """Whether it can be ranked: Keras has metrics that are several numbers."""
    return isinstance(value, Real) and math.isfinite(value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return "" if value is None else printable(str(value))


def _few(names: Any, most: int = 8) -> str:
    listed = [printable(str(name)) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
