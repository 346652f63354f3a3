"""The plan: groups, their strategies, their memory, and the reason for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from carpool.errors import described, printable
from carpool.memory.budget import check_budgets, check_fits
from carpool.memory.estimate import Estimate, Footprint, estimate
from carpool.memory.size import shown
from carpool.planning.choose import Choice, choose_all
from carpool.planning.cursor import SLICE_S, Launches, launches, most_steps
from carpool.planning.group import Candidate, Holds, Refusal, Tried, candidates
from carpool.planning.spec import ModelSpec
from carpool.planning.trials import duration
from carpool.planning.widths import slices, width_limit

Measured = Callable[[Sequence[ModelSpec]], Footprint | None]

FEW = 8  # jobs side by side: as long as more of them fit, it does not matter how many exactly
SCARCE = 3  # memory is scarce where all jobs at once, by arithmetic, would need a third of it: then groups are measured


@dataclass(frozen=True)
class Group:
    """Jobs that run together under one strategy."""

    specs: tuple[ModelSpec, ...]
    strategy: str
    reason: str
    memory: Estimate
    launches: Launches
    launch_s: float | None = None
    """How long a launch of a stack takes, where that was measured."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    @property
    def adapter(self) -> str:
        return self.specs[0].adapter


@dataclass(frozen=True)
class Plan:
    """The groups in the order they start, and the jobs that cannot run at all (`rejected`: name to error)."""

    groups: tuple[Group, ...]
    device: str
    free_bytes: int
    rejected: Mapping[str, BaseException] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Bytes of all distinct arrays: each is held once, however many jobs read it."""
        arrays = {key: size for group in self.groups for spec in group.specs for key, size in spec.data}
        return sum(arrays.values())

    def explain(self) -> str:
        """The plan in words: one paragraph a group."""
        jobs = sum(len(group.specs) for group in self.groups) + len(self.rejected)
        lines = [f"{_count(jobs, 'job')} in {_count(len(self.groups), 'group')} on {self.device}"]
        lines[0] += f"; {shown(self.data_bytes)} of data, held once; {shown(self.free_bytes)} free"
        for number, group in enumerate(self.groups):
            lines += _paragraph(number, group, self.free_bytes, None if len(self.groups) == 1 else SLICE_S)
        lines += [f"cannot run: {name}: {described(error)}" for name, error in self.rejected.items()]
        return "\n".join(map(printable, lines))

    def __str__(self) -> str:
        return self.explain()


def make_plan(
    specs: Sequence[ModelSpec],
    refusal: Refusal,
    *,
    device: str,
    free_bytes: int,
    strategy: str = "auto",
    tried: Tried = lambda specs: None,
    footprint: Measured = lambda specs: None,
    holds: Holds = lambda specs: None,
    rejected: Mapping[str, BaseException] | None = None,
) -> Plan:
    """Groups the specs by structure and gives each group its strategy, width and reason."""
    check_fits(specs, free_bytes)
    found = candidates(specs, refusal if strategy == "fused" else _unless_busy(refusal))
    wanted = _measured(found, free_bytes)
    footprints = [
        footprint(one.specs) if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True)
    ]
    limits = []
    for candidate, measured in zip(found, footprints, strict=True):
        whole = estimate(candidate.specs, measured)
        check_budgets(candidate.specs, whole)
        limits.append(width_limit(whole, free_bytes))
    found = [_tried(one, limit, tried) for one, limit in zip(found, limits, strict=True)]
    groups: list[Group] = []
    chosen = choose_all(found, strategy, holds)
    for (candidate, choice), measured, limit in zip(chosen, footprints, limits, strict=True):
        if choice.strategy == "fused" and limit == 1:
            choice = _one_at_a_time(candidate, strategy)
        parts = slices(candidate.specs, limit if choice.together else 1)
        cut = _cut(candidate, len(parts)) if choice.strategy == "fused" and limit > 1 else ""
        launch_s = candidate.trial.together_s if candidate.trial and choice.strategy == "fused" else None
        groups += [
            _group(tuple(part), choice.strategy, choice.reason + cut, measured, launch_s) for part in parts
        ]
    return Plan(tuple(groups), device, free_bytes, rejected or {})


def _unless_busy(refusal: Refusal) -> Refusal:
    """Nobody asks whether jobs can be stacked that will not be: tracing a large step takes seconds."""
    return lambda specs: None if specs[0].busy else refusal(specs)


def _measured(found: Sequence[Candidate], free_bytes: int) -> list[bool]:
    """Whose footprint is measured, which takes two traces of the step: who has a budget, and where memory is scarce every stack.

    Jobs alone only where few of them fit beside one another: otherwise it is enough to know by arithmetic when one has to wait.
    """
    expected = [estimate(one.specs).total_bytes for one in found]
    scarce = SCARCE * sum(expected) > free_bytes
    return [
        _has_budgets(one.specs) or (scarce and (len(one.specs) > 1 or FEW * needed > free_bytes))
        for one, needed in zip(found, expected, strict=True)
    ]


def _cut(candidate: Candidate, parts: int) -> str:
    """What there is to say of the stacks' width."""
    if parts == 1:
        return ""
    return f"; {parts} groups of about {-(-len(candidate.specs) // parts)} fit the memory"


def _tried(candidate: Candidate, limit: int, tried: Tried) -> Candidate:
    """With what a stack of them gains, at the width that it would have."""
    if candidate.refusal is not None or candidate.busy:
        return candidate
    widest = slices(candidate.specs, limit)[0]
    return replace(candidate, trial=tried(widest)) if len(widest) > 1 else candidate


def _one_at_a_time(candidate: Candidate, strategy: str) -> Choice:
    """A stack of one is no stack; where fused was asked for, it is one all the same."""
    reason = f"{len(candidate.specs)} jobs of one structure, but no two of them fit the memory stacked"
    return Choice("fused" if strategy == "fused" else "interleaved", reason)


def _has_budgets(specs: Sequence[ModelSpec]) -> bool:
    return any(spec.budget_bytes is not None for spec in specs)


def _group(
    specs: tuple[ModelSpec, ...],
    strategy: str,
    reason: str,
    footprint: Footprint | None,
    launch_s: float | None,
) -> Group:
    planned = launches([spec.course for spec in specs])
    return Group(specs, strategy, reason, estimate(specs, footprint), planned, launch_s)


def _paragraph(number: int, group: Group, free_bytes: int, slice_s: float | None) -> list[str]:
    counts = ", ".join(f"{n} of batch {size}" for size, n in group.launches.by_size.items())
    useful = 100 * group.launches.useful / max(1, group.launches.launched)
    lines = [
        f"group {number}: {group.strategy}, {_count(len(group.specs), 'job')}: {_names(group.names)}",
        f"  because {group.reason}",
        f"  {shown(group.memory.total_bytes)} {'measured' if group.memory.measured else 'expected'}"
        f" ({shown(group.memory.member_bytes)} a member); launches: {counts}"
        f"; {useful:.0f} % of launched member-steps are useful{_chunks(group, slice_s)}",
    ]
    if group.memory.total_bytes > free_bytes:
        short = shown(group.memory.total_bytes - free_bytes)
        lines.append(f"  does not fit: {short} more than is free; it would be tried with nothing else open")
    return lines


def _chunks(group: Group, slice_s: float | None) -> str:
    """How many steps run between two decisions, where it is known how long one takes."""
    if group.launch_s is None:
        return ""
    longest = max(spec.course.supply(0).steps for spec in group.specs)
    steps = min(longest, most_steps(group.launch_s, slice_s))
    return f"; chunks of {_count(steps, 'step')}, about {duration(steps * group.launch_s)} each"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ... {names[-1]}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
