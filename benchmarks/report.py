"""Reports as files: JSON for the record, Markdown and a plot for people, and the README's tables."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.hardware import slug
from benchmarks.record import OURS, Cold, Mix, Report, Row, from_json, to_json
from benchmarks.tables import markdown, shortly, summary
from benchmarks.workloads import WORKLOADS

USUAL = "tf32"
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"


class MarkersMissing(Exception):
    """The README has no place for the table."""


class OtherRun(Exception):
    """What is there was measured by other code, or on another GPU."""


# Files


def write(report: Report, folder: Path) -> Path:
    """Writes the JSON, and the tables beside it; the JSON's path. Called after every row, it keeps what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = place(report, folder)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(to_json(report), indent=1, ensure_ascii=False) + "\n")
    part.replace(path)  # whole or not at all: a run may be cut off at any time
    path.with_suffix(".md").write_text(markdown(report))
    return path


def place(report: Report, folder: Path) -> Path:
    """Where the report's JSON belongs: by date, hardware, kind, precision and whether it was a quick look."""
    kind = "" if report.kind in ("cpu", "gpu") else report.kind
    words = [kind, str(report.settings.get("precision", "")), "quick" if report.quick else ""]
    name = "-".join([report.date, slug(dict(report.hardware)), *(word for word in words if word)])
    return folder / f"{name}.json"


def resumed(report: Report, folder: Path) -> Report:
    """The report with what one of the same place has so far. Code and GPU must be the same; that the host was another is noted."""
    path = place(report, folder)
    if not path.exists():
        return report
    before = from_json(json.loads(path.read_text()))
    if _identity(before) != _identity(report):
        raise OtherRun(
            f"Expected {path.name} to be of this code and hardware, {_identity(report)}; it is of {_identity(before)}."
            " Move it away, or leave --resume out."
        )
    notes = dict.fromkeys((*report.notes, *before.notes))
    if before.hardware != report.hardware:
        host = "Rows were measured beside other CPUs too: {cpu}, {cores} cores.".format_map(before.hardware)
        notes |= {host: None}
    return replace(
        report,
        notes=tuple(notes),
        rows=before.rows,
        cold=before.cold,
        mix=before.mix,
        ceilings=before.ceilings or report.ceilings,
    )


def _identity(report: Report) -> dict[str, object]:
    return {"gpu": report.hardware.get("gpu"), **report.versions}


def is_whole(row: Row, windows: int) -> bool:
    """Whether carpool was timed, and every way that could be has so many windows."""
    ours = row.way(OURS)
    if ours is None or ours.rate is None or len(ours.steady or ours.windows) < windows:
        return False
    peers = [one for one in row.measured if one is not ours]
    return all(
        not one.note.startswith("skipped") if one.note else len(one.windows) >= windows for one in peers
    )


def grown(report: Report, found: Row | Cold | Mix) -> Report:
    """With one row more, or again, those of a structure beside one another."""
    if isinstance(found, Mix):
        return replace(report, mix=found)
    if isinstance(found, Cold):
        others = [one for one in report.cold if (one.workload, one.steps) != (found.workload, found.steps)]
        return replace(report, cold=(*others, found))
    places = {name: place for place, name in enumerate(WORKLOADS)}
    key = (found.workload, found.title, found.members)
    rows = (*(row for row in report.rows if (row.workload, row.title, row.members) != key), found)
    if all(row.workload in places for row in rows):
        rows = tuple(sorted(rows, key=lambda row: (places[row.workload], row.members)))
    return replace(report, rows=rows)


def newest(folder: Path) -> list[Report]:
    """The newest full report of each kind, GPU first, after each in the usual precision those in others; quick runs never count."""
    reports = [from_json(json.loads(path.read_text())) for path in sorted(folder.glob("[0-9]*.json"))]
    full = sorted((one for one in reports if not one.quick), key=lambda one: one.date)
    latest = {(report.kind, _precision(report)): report for report in full}
    places = [(kind, word) for kind in ("gpu", "cpu") for word in (USUAL, "bf16", "fp32")]
    return [latest[place] for place in places if place in latest]


def _precision(report: Report) -> str:
    return str(report.settings.get("precision", USUAL))


def rewrite_readme(readme: Path, reports: Sequence[Report], results: Path) -> None:
    """Puts the tables between the README's markers: in the usual precision with a plot where there is one, in others shortly."""
    usual = [one for one in reports if _precision(one) == USUAL]
    tables = [
        summary(report, _beside(readme, place(report, results).with_suffix(".md")))
        + _picture(report, readme, results)
        for report in usual
    ]
    if others := [one for one in reports if _precision(one) != USUAL]:
        tables.insert(1, shortly(others))
    readme.write_text(replaced(readme.read_text(), "\n".join(tables)))


def _picture(report: Report, readme: Path, results: Path) -> str:
    path = place(report, results).with_suffix(".png")
    if not path.exists():
        return ""
    return f"\n![Model-steps a second by way, {report.kind}, {report.date}]({_beside(readme, path)})\n"


def _beside(readme: Path, path: Path) -> str:
    return os.path.relpath(path, readme.parent)


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
