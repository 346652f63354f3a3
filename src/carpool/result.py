"""What became of the jobs: `Result` for one, `Results` for all of them."""

from __future__ import annotations

import enum
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from carpool.errors import OptionError, described, meant, sentence
from carpool.stopping import direction


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

    def last(self, metric: str) -> float:
        """The metric after the last epoch; NaN where there is none."""
        values = self.history.get(metric) or (math.nan,)
        return values[-1]


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
        """The jobs that raised or diverged."""
        bad = (Outcome.FAILED, Outcome.OUT_OF_MEMORY, Outcome.DIVERGED)
        return Results([result for result in self._results if result.outcome in bad], self.seconds)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that any job has, in the order first seen."""
        return tuple(dict.fromkeys(name for result in self._results for name in result.history))

    def best(self, metric: str = "val_loss", mode: str = "auto") -> Result:
        """The result whose last value of `metric` is best; diverged and failed jobs never are."""
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
                    meant(metric, self.metrics) or "name one of these, or add it to metrics=",
                )
            )
        sign = -1.0 if direction(metric, mode) == "max" else 1.0
        sound = [
            r
            for r in self._results
            if r.outcome not in (Outcome.FAILED, Outcome.OUT_OF_MEMORY, Outcome.DIVERGED)
        ]
        finite = [r for r in sound if math.isfinite(r.last(metric))]
        return sorted(finite, key=lambda result: sign * result.last(metric))

    def rows(self, sort: str | None = None, top: int | None = None) -> list[dict[str, Any]]:
        """One plain mapping a job; sorted by a metric, best first, unsound jobs last."""
        chosen = list(self._results)
        if sort is not None:
            ranked = self._ranked(sort)
            chosen = ranked + [result for result in chosen if result not in ranked]
        return [_row(result, self.metrics) for result in chosen[:top]]

    def table(self, sort: str | None = None, top: int | None = None) -> str:
        """The results as aligned text.

        >>> print(Results([Result("a", Outcome.COMPLETED, history={"loss": [0.5]}, steps=3)]).table())
        name  outcome    steps  loss
        a     completed  3      0.5
        """
        lines = [[_cell(value) for value in row.values()] for row in self.rows(sort, top)]
        head = ["name", "outcome", "steps", *self.metrics]
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in [head, *lines]
        ]
        return "\n".join(line.rstrip() for line in text)

    def frame(self) -> Any:
        """A pandas DataFrame, one row a job: its config, outcome and last metrics."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    **result.config,
                    **_row(result, self.metrics),
                    "seconds": result.seconds,
                    "strategy": result.strategy,
                }
                for result in self._results
            ],
            columns=None if self._results else ["name"],
        ).set_index("name")

    def save(self, folder: str | Path) -> Path:
        """Writes `results.json` and every trained model's weights (safetensors) into `folder`.

        What a `Loop` returned is left out unless it is a model.
        """
        from carpool import adapters

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        entries = []
        for position, result in enumerate(self._results):
            weights = f"{position:05d}.safetensors" if adapters.has_weights(result.model) else None
            if weights is not None:
                adapters.claiming(result.model)().save(result.model, target / weights)
            entries.append(_entry(result, weights))
        text = json.dumps({"seconds": self.seconds, "jobs": entries}, indent=1, default=str)
        (target / "results.json").write_text(text + "\n")
        return target

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for result in self._results:
            counts[result.outcome.word] = counts.get(result.outcome.word, 0) + 1
        return f"Results({len(self)} jobs: {', '.join(f'{n} {word}' for word, n in counts.items())}; {self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        """A notebook's table: the first hundred jobs, the count of the rest."""
        shown = self.rows(top=100)
        head = "".join(
            f"<th>{html.escape(name)}</th>" for name in ["name", "outcome", "steps", *self.metrics]
        )
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>"
            for row in shown
        )
        rest = f"<p>and {len(self) - len(shown)} more</p>" if len(self) > len(shown) else ""
        return f"<p>{html.escape(repr(self))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _row(result: Result, metrics: Sequence[str]) -> dict[str, Any]:
    values = {metric: result.last(metric) for metric in metrics}
    return {"name": result.name, "outcome": result.outcome.word, "steps": result.steps, **values}


def _entry(result: Result, weights: str | None) -> dict[str, Any]:
    return {
        "name": result.name,
        "outcome": result.outcome.word,
        "error": described(result.error) if result.error else None,
        "config": dict(result.config),
        "history": {
            metric: [_finite(value) for value in values] for metric, values in result.history.items()
        },
        "steps": result.steps,
        "seconds": result.seconds,
        "strategy": result.strategy,
        "reason": result.reason,
        "weights": weights,
    }


def _finite(value: float) -> float | str:
    """JSON has no NaN: such a value is written as its word."""
    return value if math.isfinite(value) else str(value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def _few(names: Any, most: int = 8) -> str:
    listed = [str(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
