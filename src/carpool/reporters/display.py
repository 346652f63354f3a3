"""The run as a live display: a header, a row for each group, the jobs or a leaderboard. Fits the terminal's height."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from carpool.errors import printable
from carpool.reporters.lines import count, duration, standing
from carpool.reporters.tally import GroupTally, JobTally, State, Tally

_MOST_GROUPS = 8
_ALL_JOBS = 12  # up to here every job is shown, beyond it the best ten
_LEADERS = 10
_MOST_METRICS = 4
_STYLES = {State.WAITING: "dim", State.RUNNING: "cyan", State.DONE: "green", State.FAILED: "red"}


def frame(tally: Tally, pace: float, elapsed_s: float, height: int) -> RenderableType:
    """The whole display, at most `height - 1` lines of it."""
    room = height - 3  # the header, the jobs' title and a line for the cursor
    groups = _group_rows(tally, most=max(1, min(_MOST_GROUPS, room // 3)))
    parts: list[RenderableType] = [_header(tally, pace, elapsed_s), groups]
    room -= groups.row_count
    if room > 1 and tally.jobs:
        parts += _job_rows(tally, room)
    return Stack(*parts)


def _header(tally: Tally, pace: float, elapsed_s: float) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("carpool", style="bold")
    text.append(f" on {tally.device}: {standing(tally)}", style="red" if tally.counts[State.FAILED] else "")
    text.append(f"  {pace:,.0f} member-steps/s  {duration(elapsed_s)}")
    return text


def _group_rows(tally: Tally, most: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True, overflow="ellipsis")
    groups = list(tally.groups.values())
    shown = groups if len(groups) <= most else _liveliest(groups, most - 1)
    for group in shown:
        _add_group(table, f"group {group.number}", f"{group.strategy} {group.jobs}", [group], group.note)
    if hidden := len(groups) - len(shown):
        numbers = {group.number for group in shown}
        rest = [group for group in groups if group.number not in numbers]
        ended = sum(group.ended for group in rest)
        _add_group(table, f"and {count(hidden, 'more group')}", "", rest, f"{ended:,} ended")
    return table


def _add_group(table: Table, name: str, what: str, groups: Sequence[GroupTally], note: str) -> None:
    total = sum(group.total_steps for group in groups)
    done = sum(group.fraction * group.total_steps for group in groups)
    bar = ProgressBar(total=max(1, total), completed=done if total else 1, width=24)
    percent = f"{100 * done / total:3.0f} %" if total else "100 %"
    table.add_row(Text(name), Text(what, style="dim"), bar, Text(printable(f"{percent}  {note}")))


def _liveliest(groups: Sequence[GroupTally], most: int) -> list[GroupTally]:
    """Running groups before waiting ones before ended ones, shown in the plan's order."""
    ranked = sorted(groups, key=lambda group: (group.ended, not group.started))
    return sorted(ranked[:most], key=lambda group: group.number)


def _job_rows(tally: Tally, room: int) -> list[RenderableType]:
    total = len(tally.jobs)
    whole = total <= min(_ALL_JOBS, room)
    jobs = list(tally.jobs.values()) if whole else tally.leaders(min(_LEADERS, room - 1))
    parts: list[RenderableType] = [_job_table(tally, jobs)] if jobs else []
    if total > len(jobs):
        words = (
            f"and {total - len(jobs):,} more" if jobs else f"{count(total, 'job')}, none with a metric yet"
        )
        parts.append(Text(words, style="dim"))
    return parts


def _job_table(tally: Tally, jobs: Sequence[JobTally]) -> Table:
    columns = _metric_columns(tally, jobs)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("job", "state", "epoch", *columns):
        table.add_column(
            Text(printable(title)),
            no_wrap=True,
            overflow="ellipsis",
            justify="left" if title in ("job", "state") else "right",
        )
    for job in jobs:
        epoch = f"{job.ended_epochs}/{job.epochs}"
        values = [_cell(job.metrics.get(column, math.nan)) for column in columns]
        table.add_row(Text(printable(job.name)), Text(job.word, style=_STYLES[job.state]), epoch, *values)
    return table


def _metric_columns(tally: Tally, jobs: Sequence[JobTally]) -> list[str]:
    names = dict.fromkeys([tally.metric] if tally.metric else [])
    for job in jobs:
        names.update(dict.fromkeys(job.metrics))
    return list(names)[:_MOST_METRICS]


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
