"""What a launch showed, under the names of each row's own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Shown:
    """Programs show numbers under the first model's names; Keras numbers unnamed metrics, so those of other models may differ."""

    def __init__(self, models: Sequence[Any]) -> None:
        first = _names(models[0])
        self._names: dict[int, dict[str, str]] = {}
        for row, model in enumerate(models):
            if _names(model) != first:
                pairs = zip(models[0].get_metrics_result(), model.get_metrics_result(), strict=True)
                self._names[row] = dict(pairs)

    def of(self, row: int, shown: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The row's numbers, as Keras' logs hold them: floats, and arrays for a metric that has several."""
        names = self._names.get(row, {})
        return {names.get(name, name): _number(values[row]) for name, values in shown.items()}

    def narrow(self, rows: Sequence[int]) -> None:
        """Only these rows go on, and are numbered anew."""
        self._names = {place: self._names[row] for place, row in enumerate(rows) if row in self._names}


def _names(model: Any) -> list[str]:
    compiled = getattr(model, "_compile_metrics", None)
    return [] if compiled is None else [str(metric.name) for metric in compiled.metrics]


def _number(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else np.asarray(value)
