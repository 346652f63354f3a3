"""Reports as files: JSON for the record, Markdown and a plot for people, and the README's tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.hardware import slug
from benchmarks.record import OURS, Cold, Report, Row, from_json, to_json
from benchmarks.tables import markdown

START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"


class MarkersMissing(Exception):
    """The README has no place for the table."""


# Files


def write(report: Report, folder: Path) -> Path:
    """Writes the JSON, and the tables beside it; the JSON's path. Called after every row, it keeps what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = place(report, folder)
    path.write_text(json.dumps(to_json(report), indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(markdown(report))
    return path


def place(report: Report, folder: Path) -> Path:
    """Where the report's JSON belongs: by date, hardware, kind, precision and whether it was a quick look."""
    kind = "" if report.kind in ("cpu", "gpu") else report.kind
    words = [kind, str(report.settings.get("precision", "")), "quick" if report.quick else ""]
    name = "-".join([report.date, slug(dict(report.hardware)), *(word for word in words if word)])
    return folder / f"{name}.json"


def resumed(report: Report, folder: Path) -> Report:
    """The report with the whole rows of one of the same place that was cut, where hardware and versions are the same."""
    path = place(report, folder)
    if not path.exists():
        return report
    before = from_json(json.loads(path.read_text()))
    if (before.hardware, before.versions) != (report.hardware, report.versions):
        return report
    return replace(
        report,
        rows=tuple(row for row in before.rows if _is_whole(row)),
        cold=tuple(one for one in before.cold if not one.note),
        ceilings=before.ceilings or report.ceilings,
    )


def _is_whole(row: Row) -> bool:
    """Whether carpool was timed and no way was left out for want of time."""
    ours = row.way(OURS)
    is_timed = ours is not None and ours.rate is not None
    return is_timed and not any(one.note.startswith("skipped") for one in row.measured)


def grown(report: Report, found: Row | Cold) -> Report:
    """With one row more."""
    if isinstance(found, Cold):
        return replace(report, cold=(*report.cold, found))
    return replace(report, rows=(*report.rows, found))


def newest(folder: Path) -> list[Report]:
    """The newest full report of each kind, GPU first; quick runs and other precisions than the usual one never count."""
    reports = [from_json(json.loads(path.read_text())) for path in sorted(folder.glob("[0-9]*.json"))]
    usual = [one for one in reports if not one.quick and one.settings.get("precision", "tf32") == "tf32"]
    latest = {report.kind: report for report in sorted(usual, key=lambda one: one.date)}
    return [latest[kind] for kind in ("gpu", "cpu") if kind in latest]


def rewrite_readme(readme: Path, reports: Iterable[Report], results: Path) -> None:
    """Puts the tables between the README's markers, each with its plot where there is one."""
    tables = "\n".join(markdown(report) + _picture(report, readme, results) for report in reports)
    readme.write_text(replaced(readme.read_text(), tables))


def _picture(report: Report, readme: Path, results: Path) -> str:
    path = place(report, results).with_suffix(".png")
    if not path.exists():
        return ""
    where = os.path.relpath(path, readme.parent)
    return f"\n![Model-steps a second by way, {report.kind}, {report.date}]({where})\n"


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
