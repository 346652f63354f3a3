"""The run as plain lines, for log files and pipes: few, and each complete in itself."""

from __future__ import annotations

from carpool.errors import printable
from carpool.events import (
    Event,
    GroupCompiled,
    GroupFellBack,
    GroupResized,
    GroupStarted,
    GroupVerified,
    RunStarted,
)
from carpool.fidelity import Proof
from carpool.planning.plan import Plan
from carpool.reporters.tally import JobTally, State, Tally


def line(event: Event, tally: Tally) -> str | None:
    """The line an event deserves at once, or None; `tally` has taken the event already.

    A group of one job is worth none (there may be thousands), and neither is a quick trace or a check after a
    group's first (`verify=True` makes one every epoch).
    """
    match event:
        case RunStarted(plan, device, steps):
            return _plan_line(plan, device, steps)
        case GroupFellBack(group, names, reason):
            return f"group {group}: {count(len(names), 'job')} go on one by one: {printable(reason)}"
        case GroupStarted(group, names, strategy) if len(names) > 1:
            return f"group {group}: started, {count(len(names), 'job')} {strategy}"
        case GroupCompiled(group, size, width, form, seconds) if form != "traced" or seconds >= 1.0:
            word = "resident (machine code)" if form == "resident" else form
            return f"group {group}: {word} for {width} members and batches of {size} in {seconds:.1f} s"
        case GroupVerified(group) if tally.groups[group].checks == 1:
            return f"group {group}: {_verified(event)}"
        case GroupResized(group, old_width, new_width):
            return f"group {group}: repacked from {old_width} to {new_width} members"
        case _:
            return None


def progress(tally: Tally, pace: float, elapsed_s: float) -> str:
    """How the run stands, in one line."""
    return f"{standing(tally)}; {100 * tally.fraction:.0f} % of steps; {pace:,.0f} member-steps/s; {duration(elapsed_s)}"


def failure(name: str, error: str) -> str:
    """A job's failure in one line."""
    return f"failed: {printable(name)}: {printable(error)}"


def summary(tally: Tally, elapsed_s: float) -> str:
    """How the run ended, in one line."""
    seconds = elapsed_s if tally.seconds is None else tally.seconds
    ended = ", ".join(f"{number} {word}" for word, number in tally.outcomes.items()) or "none ended"
    parts = [
        f"{count(len(tally.jobs), 'job')}: {ended}",
        f"{tally.steps:,} member-steps in {duration(seconds)}",
    ]
    if tally.compile_s:
        parts.append(f"{duration(tally.compile_s)} of it preparing")
    parts += [f"best {printable(tally.metric or '')} {_best(tally, job)}" for job in tally.best(1)]
    return "; ".join(parts)


def standing(tally: Tally) -> str:
    """How many jobs are where.

    >>> standing(Tally())
    '0 of 0 jobs done, 0 running, 0 waiting'
    """
    counts = tally.counts
    text = f"{counts[State.DONE]} of {len(tally.jobs)} jobs done, "
    text += f"{counts[State.RUNNING]} running, {counts[State.WAITING]} waiting"
    return text + (f", {counts[State.FAILED]} failed" if counts[State.FAILED] else "")


def duration(seconds: float) -> str:
    """Seconds the way people read them.

    >>> duration(3.21), duration(75), duration(3723)
    ('3.2 s', '1 min 15 s', '1 h 02 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: int, word: str) -> str:
    """A number of things.

    >>> count(1, "job"), count(1000, "job")
    ('1 job', '1,000 jobs')
    """
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _plan_line(plan: Plan, device: str, steps: int) -> str:
    by_strategy: dict[str, int] = {}
    for group in plan.groups:
        by_strategy[group.strategy] = by_strategy.get(group.strategy, 0) + len(group.specs)
    if plan.rejected:
        by_strategy["cannot run"] = len(plan.rejected)
    shares = ", ".join(f"{number:,} {strategy}" for strategy, number in by_strategy.items())
    jobs = count(sum(by_strategy.values()), "job")
    return f"{jobs} in {count(len(plan.groups), 'group')} on {device}: {shares}; {steps:,} steps"


def _verified(event: GroupVerified) -> str:
    """What was compared, and how."""
    if event.proof is Proof.TRACES:
        return f"the steps of {count(event.checked, 'member')} have equal traces; none was run alone"
    return f"first step verified against {event.checked} alone, largest difference {event.max_difference:.1e}"


def _best(tally: Tally, job: JobTally) -> str:
    return f"{job.metrics[tally.metric or '']:.4g} ({printable(job.name)})"
