"""A report as a picture: bars of model-steps a second by way and row, the floor as a line. Needs matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.record import OURS, Report, Row
from benchmarks.tables import count

_BAR_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.22, 0.45, 9.0
_OURS, _OPEN, _PEER, _FLOOR = "#c2410c", "#f59e0b", "#94a3b8", "#111827"


def is_there() -> bool:
    """Whether plots can be drawn."""
    return find_spec("matplotlib") is not None


def bars(row: Row) -> list[tuple[str, float]]:
    """Label and model-steps a second of everything that was measured, the slowest first."""
    found = [(one.way, one.rate) for one in row.measured if one.rate]
    ours = row.way(OURS)
    if ours is not None and ours.steady_rate:
        found.append((f"{OURS}, once open", ours.steady_rate))
    return sorted(found, key=lambda bar: bar[1])


def drawn(report: Report) -> list[Row]:
    """The rows that have a bar."""
    return [row for row in report.rows if bars(row)]


def draw(report: Report, path: Path) -> Path:
    """Writes the PNG, of a report that has a row to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = drawn(report)
    heights = [_BAR_INCHES * len(bars(row)) + _HEAD_INCHES for row in rows]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + _HEAD_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights)
    for axis, row in zip(axes[:, 0], rows, strict=True):
        _draw_row(axis, row, row.bound(report.ceilings))
    name = report.hardware.get("gpu", report.hardware["cpu"])
    precision = report.settings.get("precision", "float32")
    figure.suptitle(
        f"model-steps a second: {name}, {precision}, {report.date} (dashed: the floor)", fontsize=10
    )
    figure.savefig(path, dpi=110)
    return path


def _draw_row(axis: Any, row: Row, bound: float | None) -> None:
    found = bars(row)
    colours = {OURS: _OURS, f"{OURS}, once open": _OPEN}
    shown = axis.barh(
        [name for name, _ in found],
        [rate for _, rate in found],
        color=[colours.get(name, _PEER) for name, _ in found],
    )
    axis.bar_label(shown, labels=[count(rate) for _, rate in found], padding=3, fontsize=7)
    axis.set_xscale("log")
    axis.set_xlim(0.5 * found[0][1], 4 * max(found[-1][1], bound or 0))
    if bound is not None:
        axis.axvline(bound, color=_FLOOR, linewidth=1, linestyle="--")
    axis.set_title(f"{row.members} × {row.title}, batch {row.batch_size}", fontsize=8, loc="left")
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
