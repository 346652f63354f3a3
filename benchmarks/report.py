"""Reports as files: JSON for the record, Markdown for people, and the README's table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.hardware import slug
from benchmarks.record import OURS, Measured, Report, Row, from_json, to_json

START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"


class MarkersMissing(Exception):
    """The README has no place for the table."""


# Files


def write(report: Report, folder: Path) -> Path:
    """Writes the JSON, and the table beside it; the JSON's path. Called after every row, it keeps what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    quick = "-quick" if report.quick else ""
    kind = "" if report.kind in ("cpu", "gpu") else f"-{report.kind}"
    path = folder / f"{report.date}-{slug(dict(report.hardware))}{kind}{quick}.json"
    path.write_text(json.dumps(to_json(report), indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(markdown(report))
    return path


def newest(folder: Path) -> list[Report]:
    """The newest full report of each kind, GPU first; quick runs never count."""
    reports = [from_json(json.loads(path.read_text())) for path in sorted(folder.glob("[0-9]*.json"))]
    latest = {report.kind: report for report in sorted(reports, key=lambda one: one.date) if not report.quick}
    return [latest[kind] for kind in ("gpu", "cpu") if kind in latest]


def rewrite_readme(readme: Path, reports: Iterable[Report]) -> None:
    """Puts the tables between the README's markers."""
    tables = "\n".join(markdown(report) for report in reports)
    readme.write_text(replaced(readme.read_text(), tables))


def replaced(text: str, table: str) -> str:
    """The text with the table between the markers.

    >>> print(replaced(f"a\\n{START}\\nold\\n{END}\\nb", "new"))
    a
    <!-- benchmarks:start -->
    new
    <!-- benchmarks:end -->
    b
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise MarkersMissing(
            f"Expected the lines {START} and {END}, in this order; they are not there. Add them where the table belongs."
        )
    return f"{before}{START}\n{table.strip()}\n{END}{after}"


# Tables


def markdown(report: Report) -> str:
    """The report as a table with what a reader must know under it."""
    peers = [way for way in report.ways if way != OURS]
    columns = ["models", *peers, "carpool", *_own_heads(report), "first call", "warm call"]
    lines = [_line(columns), _line(["---"] * len(columns))]
    lines += [
        _line([*_cells(row, peers), *_own_cells(report, row), *_call_cells(row)]) for row in report.rows
    ]
    return "\n".join([*lines, "", *_caption(report), ""])


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    ours = row.way(OURS)
    return [
        f"{row.members} × {row.title}, batch {row.batch_size}",
        *(_peer_cell(row, peer) for peer in peers),
        f"**{count(ours.rate)}**" if ours and ours.rate else _missing(ours),
    ]


def _peer_cell(row: Row, peer: str) -> str:
    found, ratio = row.way(peer), row.ratio(peer)
    if found is None or found.rate is None:
        return _missing(found)
    return f"{count(found.rate)} ({times(ratio)})" if ratio is not None else count(found.rate)


def _missing(measured: Measured | None) -> str:
    return measured.note.partition(":")[0] if measured and measured.note else "–"


def _own_heads(report: Report) -> list[str]:
    return ["carpool, after opening", "peak memory" if report.kind == "gpu" else "largest Δ weight"]


def _own_cells(report: Report, row: Row) -> list[str]:
    ours = row.way(OURS)
    steady = count(ours.steady_rate) if ours and ours.steady_rate else "–"
    if report.kind == "gpu":
        return [steady, f"{ours.peak_bytes / 2**30:.2f} GiB" if ours and ours.peak_bytes else "–"]
    found = row.fidelity
    return [steady, f"{found.max_difference:.1e} after {found.steps} steps" if found else "–"]


def _call_cells(row: Row) -> list[str]:
    ours = row.way(OURS)
    first = f"{ours.first.seconds:.1f} s" if ours and ours.first else "–"
    warm = f"{ours.seconds:.1f} s, {row.steps} steps" if ours and ours.seconds else "–"
    return [first, warm]


def _caption(report: Report) -> list[str]:
    hardware = dict(report.hardware)
    where = f"{hardware.get('gpu', hardware['cpu'])}, {hardware['cores']} CPU cores"
    if threads := report.settings.get("torch_threads"):
        where += f", torch with {threads} thread{'s' if threads > 1 else ''}"
    packages = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    rounds = sorted({len(one.windows) for row in report.rows for one in row.measured if one.windows} or {0})
    counted = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} (fewest) to {rounds[-1]}"
    odd = [
        f"- {row.members} × {row.workload}, {one.way}: {one.note}"
        for row in report.rows
        for one in row.measured
        if one.note and not one.note.startswith("skipped")  # the cell says so
    ]
    return [
        f"Model-steps a second, summed over the models: medians of {counted} windows in which the ways take turns;"
        " in brackets how many times faster carpool is.",
        f"{where}; {packages}; {report.date}; `python -m benchmarks {report.kind}{' --quick' if report.quick else ''}`.",
        "",
        *(f"- {note}" for note in report.notes),
        *odd,
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def count(value: float) -> str:
    """A rate in three digits.

    >>> count(650.2), count(12345.0), count(5_520_000.0)
    ('650', '12.3 k', '5.52 M')
    """
    for limit, unit in ((1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * limit:
            return _three(value / limit) + unit
    return _three(value)


def times(ratio: float) -> str:
    """A ratio in words that fit a cell.

    >>> times(0.52), times(13.21), times(8461.0)
    ('0.52×', '13.2×', '8,461×')
    """
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{_three(ratio)}×"


def _three(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
