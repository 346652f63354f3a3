"""Reports as Markdown: what a call of carpool takes, every peer's rate, cold calls, and what a reader must know."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.jax_worker import NAME as JAX
from benchmarks.record import OURS, Cold, Fidelity, Measured, Mix, Report, Row

_LOOPS = ("eager loop", "plain loop")  # one model after another, as most people train them


def markdown(report: Report) -> str:
    """The tables, one after another, with a caption under them."""
    return _joined(
        [_headline(report), _peers(report), _beginnings(report), *_others(report), _caption(report)]
    )


def summary(report: Report, record: str) -> str:
    """What stands in the README: without each peer's rates, which are in the record."""
    where = f"[Every peer's rate, time to begin and memory, and what the columns mean]({record})."
    return _joined([_headline(report), *_others(report), [*_measured_how(report), where]])


def _others(report: Report) -> list[list[str]]:
    return [*([_cold(report)] if report.cold else []), *([_mix(report.mix)] if report.mix else [])]


def _joined(parts: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def shortly(reports: Sequence[Report]) -> str:
    """A table of rows in other precisions, with what was measured beside them in the same run."""
    heads = ["models", "precision", OURS, "once open", "÷ eager loop"]
    heads += ["÷ best torch peer", f"÷ {JAX}", "largest Δ weight"]
    rows = [
        [_models(row), word, *_rate_cells(row), _ratios(row, JAX), _fidelity_cell(row.fidelity)]
        for word, report in ((str(report.settings.get("precision")), report) for report in reports)
        for row in report.rows
    ]
    return "\n".join(_table(heads, rows)) + "\n"


# carpool itself


def _headline(report: Report) -> list[str]:
    heads = ["models", "first step", "first call", "warm call", "carpool", "once open"]
    heads += ["÷ eager loop", "÷ best torch peer"]
    heads += [f"÷ {JAX}"] if JAX in report.ways else []
    heads += ["of the floor"] if report.ceilings else []
    heads += ["memory a model"] if report.kind == "gpu" else []
    return _table([*heads, "largest Δ weight"], [_headline_cells(report, row) for row in report.rows])


def _headline_cells(report: Report, row: Row) -> list[str]:
    cells = [_models(row), *_call_cells(row), *_rate_cells(row)]
    cells += [_ratios(row, JAX)] if JAX in report.ways else []
    cells += [_floor_cell(report, row)] if report.ceilings else []
    cells += [_memory_cell(row)] if report.kind == "gpu" else []
    return [*cells, _fidelity_cell(row.fidelity)]


def _rate_cells(row: Row) -> list[str]:
    """Of a whole warm call, once open, and beside the best peer."""
    ours, best = row.way(OURS), row.best(apart=(JAX,))
    whole = f"**{count(ours.rate)}**" if ours and ours.rate else _missing(ours)
    open = count(ours.steady_rate) if ours and ours.steady_rate else "–"
    loop = next((way for way in _LOOPS if row.way(way)), _LOOPS[0])
    return [whole, open, _ratios(row, loop), f"{_ratios(row, best)}, {best}" if best else "–"]


def _call_cells(row: Row) -> list[str]:
    ours = row.way(OURS)
    step = f"{ours.first_step_s:.1f} s" if ours and ours.first_step_s is not None else "–"
    first = f"{ours.first.seconds:.1f} s" if ours and ours.first else "–"
    warm = f"{ours.seconds:.1f} s, {row.steps} steps" if ours and ours.seconds else "–"
    return [step, first, warm]


def _ratios(row: Row, peer: str) -> str:
    """Of the whole warm call, and once open."""
    whole, open = row.ratio(peer), row.open_ratio(peer)
    return f"{times(whole)} / {times(open) if open else '–'}" if whole else "–"


def _floor_cell(report: Report, row: Row) -> str:
    bound, ours = row.bound(report.ceilings), row.way(OURS)
    if not bound or not ours or not ours.steady_rate:
        return "–"
    return f"{ours.steady_rate / bound:.2f} of {count(bound)}"


def _memory_cell(row: Row) -> str:
    ours = row.way(OURS)
    return f"{ours.peak_bytes / row.members / 2**20:.1f} MiB" if ours and ours.peak_bytes else "–"


def _fidelity_cell(found: Fidelity | None) -> str:
    if found is None:
        return "–"
    own = "" if found.by_precision is None else f" ({found.by_precision:.1e})"
    return f"{found.max_difference:.1e}{own} after {found.steps} steps"


# Peers and cold calls


def _peers(report: Report) -> list[str]:
    peers = [way for way in report.ways if way != OURS]
    return _table(
        ["models", *peers],
        [[_models(row), *(_peer_cell(row, peer) for peer in peers)] for row in report.rows],
    )


def _peer_cell(row: Row, peer: str) -> str:
    found = row.way(peer)
    if found is None or found.rate is None:
        return _missing(found)
    return f"{count(found.rate)} ({_ratios(row, peer)})" if row.ratio(peer) else count(found.rate)


def _beginnings(report: Report) -> list[str]:
    """What every way takes before its first window, and the most memory it held, by model."""
    return _table(
        ["built, compiled, warmed up; memory a model", *report.ways],
        [[_models(row), *(_beginning_cell(row, way) for way in report.ways)] for row in report.rows],
    )


def _beginning_cell(row: Row, way: str) -> str:
    found = row.way(way)
    if found is None or found.first is None:
        return "–"
    held = f", {found.peak_bytes / found.members / 2**20:.1f} MiB" if found.peak_bytes else ""
    return f"{found.first.seconds:.1f} s{held}"


def _mix(mix: Mix) -> list[str]:
    """Scores of every way, and carpool's over each."""
    ways, ours = list(mix.makespans), [way for way in mix.makespans if way.startswith(OURS)]
    heads = [
        "a mix of different models",
        "makespan",
        "eager in turn ÷ makespan",
        *(f"{own} ÷ it" for own in ours),
    ]
    return _table(
        heads,
        [
            [way, f"{mix.seconds(way):.2f} s", times(mix.score(way))]
            + [times(mix.seconds(way) / mix.seconds(own)) for own in ours]
            for way in ways
        ],
    )


def _cold(report: Report) -> list[str]:
    heads = ["from nothing", "first step", "whole call", "second run: first step", "whole call", "eager loop"]
    return _table([*heads, "eager loop ÷ whole call, both runs"], [_cold_cells(one) for one in report.cold])


def _cold_cells(one: Cold) -> list[str]:
    cells = [f"{one.members} × {one.title}, {one.steps} steps"]
    for call in (one.first, one.again):
        cells += [f"{call.first_step_s:.1f} s", f"{call.seconds:.1f} s"] if call else ["–", "–"]
    if one.eager_s is None:
        return [*cells, "–", "–"]
    gains = [times(one.eager_s / call.seconds) for call in (one.first, one.again) if call]
    return [*cells, f"{one.eager_s:.1f} s", ", ".join(gains) or "–"]


# What stands under them


def _caption(report: Report) -> list[str]:
    return [
        *_measured_how(report),
        "",
        *(f"- {note}" for note in report.notes),
        *_cold_notes(report.cold),
        *_odd(report),
    ]


def _measured_how(report: Report) -> list[str]:
    hardware = dict(report.hardware)
    where = f"{hardware.get('gpu', hardware['cpu'])}, {hardware['cores']} CPU cores"
    if threads := report.settings.get("torch_threads"):
        where += f", torch with {threads} thread{'s' if threads > 1 else ''}"
    if precision := report.settings.get("precision"):
        where += f", {precision}"
    packages = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    options = " --quick" if report.quick else ""
    options += f" --precision {precision}" if precision else ""
    return [
        f"Model-steps a second, summed over the models: medians of {_rounds(report)} windows in which the ways take turns;"
        " in brackets, and after ÷, how many times faster carpool is: a whole warm call / once open.",
        f"{where}; {packages}; {report.date}; `python -m benchmarks {report.kind}{options}`.",
    ]


def _rounds(report: Report) -> str:
    found = sorted({len(one.windows) for row in report.rows for one in row.measured if one.windows} or {0})
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} (fewest) to {found[-1]}"


def _cold_notes(cold: Sequence[Cold]) -> list[str]:
    if not cold:
        return []
    return [
        "- From nothing: a fresh process with every cache empty, from the call of `carpool.train` to its return, loading compilers included,"
        " importing torch not; the second run is another process that finds what the first left on disk.",
        "- The eager loop's time is counted up from all steps of two models in a fresh process; what it loads once counts once. Each figure is one call's.",
        *(f"- {one.members} × {one.workload}, {one.steps} steps: {one.note}" for one in cold if one.note),
    ]


def _odd(report: Report) -> list[str]:
    return [
        f"- {row.members} × {row.workload}, {one.way}: {one.note}"
        for row in report.rows
        for one in row.measured
        if one.note and not one.note.startswith("skipped")  # the cell says so
    ]


# Cells


def _models(row: Row) -> str:
    return f"{row.members} × {row.title}, batch {row.batch_size}"


def _missing(measured: Measured | None) -> str:
    return measured.note.partition(":")[0] if measured and measured.note else "–"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(heads), _line(["---"] * len(heads)), *(_line(row) for row in rows)]


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
