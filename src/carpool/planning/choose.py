"""Which strategy a candidate gets: an ordered list of small rules, each giving a strategy and the sentence that explains it.

`interleaved` jobs have a session each and share the device. `isolated` ones have a process each, or one for those that are fused
in it. `in_turn` is the plain way, only when asked for: each job through
its own session, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from carpool.errors import FusionError, OptionError, meant, sentence, shown
from carpool.planning.group import Candidate, Holds

STRATEGIES = ("auto", "fused", "interleaved", "isolated", "in_turn")


@dataclass(frozen=True)
class Choice:
    """A strategy and the reason for it."""

    strategy: str
    reason: str
    together: bool = False
    """Whether the jobs are one group: stacked, here or in their worker."""


def _asked_for(candidate: Candidate, strategy: str) -> Choice | None:
    if strategy in ("interleaved", "in_turn"):
        return Choice(strategy, f'strategy="{strategy}" was asked for')
    return None


def _apart(candidate: Candidate, strategy: str) -> Choice | None:
    """In processes of their own: asked for, or for a reason that only a process can serve."""
    needed = next((spec.apart for spec in candidate.specs if spec.apart), None)
    if strategy != "isolated" and (needed is None or strategy != "auto"):
        return None
    reason = 'strategy="isolated" was asked for' if strategy == "isolated" else str(needed)
    slower = candidate.busy or (candidate.trial is not None and not candidate.trial.pays)
    if len(candidate.specs) == 1 or candidate.refusal is not None or slower:
        return Choice("isolated", reason)
    return Choice("isolated", f"{reason}; {len(candidate.specs)} jobs of one structure share a worker", True)


def _holds_the_lock(candidate: Candidate, strategy: str) -> Choice | None:
    if candidate.hold is None or strategy != "auto":
        return None
    if not all(candidate.hold.isolates(spec.course.steps) for spec in candidate.specs):
        return None
    return Choice("isolated", f"{candidate.hold.origin}: {candidate.hold}, and other jobs wait for it")


def _cannot_stack(candidate: Candidate, strategy: str) -> Choice | None:
    if candidate.refusal is None:
        return None
    if strategy == "fused":
        names = ", ".join(repr(spec.name) for spec in candidate.specs[:3])
        raise FusionError(
            f"Cannot fuse {names}{', ...' if len(candidate.specs) > 3 else ''}: {candidate.refusal}. "
            'Remedy: change that, or pass strategy="auto" to let them run interleaved.'
        )
    return Choice("interleaved", f"cannot be stacked: {candidate.refusal}{_and_hold(candidate)}")


def _alone(candidate: Candidate, strategy: str) -> Choice | None:
    first, *others = candidate.specs
    if others:
        return None
    why = f" ({candidate.stranger})" if candidate.stranger else ""
    if strategy == "fused":
        raise FusionError(
            f"Cannot fuse {first.name!r}: no other job has its structure{why}. "
            'Remedy: align the structures, or pass strategy="auto" to let it run interleaved.'
        )
    return Choice("interleaved", f"no other job has its structure{why}{_and_hold(candidate)}")


def _keeps_it_busy(candidate: Candidate, strategy: str) -> Choice | None:
    if not candidate.busy or strategy == "fused":
        return None
    return Choice("interleaved", candidate.busy)


def _slower_together(candidate: Candidate, strategy: str) -> Choice | None:
    trial = candidate.trial
    if trial is None or trial.pays or strategy == "fused":
        return None
    return Choice("interleaved", f"{trial.origin}: {trial}")


def _and_hold(candidate: Candidate) -> str:
    """Of jobs that were measured and stay: how much of a step holds Python's lock."""
    return f"; {candidate.hold.origin}: {candidate.hold}" if candidate.hold is not None else ""


def _stack(candidate: Candidate, strategy: str) -> Choice | None:
    known = f" ({candidate.trial.origin}: {candidate.trial})" if candidate.trial is not None else ""
    count = len(candidate.specs)
    return Choice("fused", f"{count} jobs of one structure: one launch advances all of them{known}", True)


Rule = Callable[[Candidate, str], Choice | None]
RULES: tuple[Rule, ...] = (
    _asked_for,
    _apart,
    _holds_the_lock,
    _alone,
    _keeps_it_busy,
    _cannot_stack,
    _slower_together,
    _stack,
)


def check_strategy(strategy: str) -> None:
    """Raises for a strategy that does not exist."""
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        remedy = meant(strategy, STRATEGIES) or 'pass strategy="auto" if unsure'
        raise OptionError(sentence(f"a strategy out of {', '.join(STRATEGIES)}", shown(strategy), remedy))


def choose_all(found: Sequence[Candidate], strategy: str, holds: Holds) -> list[tuple[Candidate, Choice]]:
    """A choice for each. `holds` is asked for those that would share one interpreter with others, unfused."""
    first = [(candidate, choose(candidate, strategy)) for candidate in found]
    beside = [candidate for candidate, choice in first if choice.strategy == "interleaved"]
    if sum(len(candidate.specs) for candidate in beside) < 2:
        return first
    held = {id(candidate): replace(candidate, hold=holds(candidate.specs)) for candidate in beside}
    again = [held.get(id(candidate), candidate) for candidate in found]
    return [(candidate, choose(candidate, strategy)) for candidate in again]


def choose(candidate: Candidate, strategy: str = "auto") -> Choice:
    """The first rule that has an answer, and what the jobs' notes add to it."""
    made = next(choice for rule in RULES if (choice := rule(candidate, strategy)) is not None)
    notes = dict.fromkeys(spec.note for spec in candidate.specs if spec.note)
    return replace(made, reason="; ".join([made.reason, *notes])) if notes else made
