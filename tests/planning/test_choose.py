"""The rules that choose a strategy, and the sentence each gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from carpool.errors import FusionError, OptionError
from carpool.planning.choose import Choice, check_strategy, choose, choose_all
from carpool.planning.cursor import Course
from carpool.planning.group import Candidate
from carpool.planning.holds import Hold
from carpool.planning.spec import ModelSpec
from carpool.planning.trials import Trial


def candidate(
    count: int, refusal: str | None = None, stranger: str | None = None, names: str = "abcdefgh"
) -> Candidate:
    specs = tuple(ModelSpec(name, "torch", (), Course(8, 4, 1), 1, 1) for name in names[:count])
    return Candidate(specs, refusal, stranger)


def test_jobs_of_one_structure_are_fused():
    assert choose(candidate(3)) == Choice(
        "fused", "3 jobs of one structure: one launch advances all of them", together=True
    )
    assert choose(candidate(3), "fused").strategy == "fused"


def test_a_job_alone_runs_interleaved_and_says_how_it_differs():
    assert choose(candidate(1)) == Choice("interleaved", "no other job has its structure")
    why = "differs from 'a': it has no 'fc'"
    assert choose(candidate(1, stranger=why)).reason == f"no other job has its structure ({why})"


def test_what_cannot_be_stacked_runs_interleaved_and_says_why():
    chosen = choose(candidate(2, refusal="LBFGS has no stacked update"))
    assert chosen == Choice("interleaved", "cannot be stacked: LBFGS has no stacked update")


def test_in_turn_that_was_asked_for_is_what_it_gets():
    assert choose(candidate(3), "in_turn") == Choice("in_turn", 'strategy="in_turn" was asked for')


def test_isolated_jobs_of_one_structure_share_a_worker_where_they_stack():
    shared = choose(candidate(3), "isolated")
    assert (shared.strategy, shared.together) == ("isolated", True)
    assert shared.reason == 'strategy="isolated" was asked for; 3 jobs of one structure share a worker'
    alone = Choice("isolated", 'strategy="isolated" was asked for')
    assert choose(candidate(1), "isolated") == alone
    assert choose(candidate(3, refusal="no"), "isolated") == alone
    slower = Trial(members=3, together_s=1.0, alone_s=0.1)
    assert choose(replace(candidate(3), trial=slower), "isolated") == alone


def test_what_only_a_process_can_keep_isolates():
    one = candidate(1)
    needs = replace(one, specs=(replace(one.specs[0], apart="share is for processes"),))
    assert choose(needs) == Choice("isolated", "share is for processes")
    assert choose(needs, "in_turn").strategy == "in_turn"


def test_fused_that_was_asked_for_raises_with_the_reason():
    with pytest.raises(FusionError) as caught:
        choose(candidate(2, refusal="'drop' is random"), "fused")
    assert str(caught.value) == (
        "Cannot fuse 'a', 'b': 'drop' is random. "
        'Remedy: change that, or pass strategy="auto" to let them run interleaved.'
    )


def test_a_long_list_of_names_is_shortened():
    with pytest.raises(FusionError, match=r"^Cannot fuse 'a', 'b', 'c', \.\.\.: no\. "):
        choose(candidate(5, refusal="no"), "fused")


def test_fused_for_a_job_alone_names_what_differs():
    with pytest.raises(
        FusionError, match=r"Cannot fuse 'a': .*structure \(differs from 'z': .*\)\. Remedy: "
    ):
        choose(candidate(1, stranger="differs from 'z': it has no 'fc'"), "fused")


def test_what_was_measured_slower_together_is_interleaved_and_says_so():
    slow = replace(candidate(8), trial=Trial(8, together_s=0.01, alone_s=0.001))
    assert choose(slow) == Choice(
        "interleaved",
        "measured on this device: a step of 8 together takes 10 ms (uncompiled), one after another 8 ms",
    )
    assert choose(slow, "fused").strategy == "fused"


def test_what_was_measured_faster_together_is_fused_and_says_so():
    fast = replace(candidate(8), trial=Trial(8, together_s=0.001, alone_s=0.001, compiled=True))
    assert choose(fast).strategy == "fused"
    assert "a step of 8 together takes 1 ms (compiled), one after another 8 ms" in choose(fast).reason


@pytest.mark.parametrize("strategy", ["auto", "fused", "interleaved", "in_turn"])
def test_strategies_that_exist_pass(strategy: str):
    assert check_strategy(strategy) is None


def test_a_strategy_that_does_not_exist_is_refused():
    with pytest.raises(
        OptionError,
        match=r"Expected a strategy out of auto, fused, interleaved, isolated, in_turn\. Received: 'fast'\.",
    ):
        check_strategy("fast")


# Who would hold the others up


BOUND = Hold(share=0.9, step_s=1.0)


def long(count: int, **options: Any) -> Candidate:
    found = candidate(count, **options)
    return replace(found, specs=tuple(replace(spec, course=Course(80, 4, 1)) for spec in found.specs))


def chosen(
    found: list[Candidate], strategy: str = "auto", hold: Hold | None = BOUND
) -> tuple[list[str], int]:
    asked = []
    made = choose_all(found, strategy, lambda specs: (asked.append(specs), hold)[1])
    return [choice.strategy for _, choice in made], len(asked)


def test_jobs_that_hold_the_lock_are_isolated_beside_others():
    assert chosen([long(1), long(1)]) == (["isolated", "isolated"], 2)
    assert chosen([long(2, refusal="no")]) == (["isolated"], 1)


def test_a_job_with_nobody_beside_it_is_not_asked():
    assert chosen([long(1)]) == (["interleaved"], 0)
    assert chosen([long(1), long(3)]) == (["interleaved", "fused"], 0)
    assert chosen([long(1), long(1), long(3)]) == (["isolated", "isolated", "fused"], 2)


def test_what_is_not_known_or_not_held_or_short_stays():
    assert chosen([long(1), long(1)], hold=None)[0] == ["interleaved", "interleaved"]
    assert chosen([long(1), long(1)], hold=Hold(0.1, 1.0))[0] == ["interleaved", "interleaved"]
    assert chosen([long(1), candidate(1)])[0] == ["isolated", "interleaved"]


def test_the_reason_says_what_was_measured():
    choice = choose(replace(long(1), hold=BOUND))
    assert choice.reason == (
        "measured on this device: a step holds Python's interpreter lock for 90 % of its 1e+03 ms, and other jobs wait for it"
    )
    assert choose(replace(long(1), hold=BOUND), "interleaved").strategy == "interleaved"
    free = "; measured on this device: a step holds Python's interpreter lock for 10 % of its 1e+03 ms"
    assert choose(replace(long(1), hold=Hold(0.1, 1.0))).reason == "no other job has its structure" + free
    refused = choose(replace(long(2, refusal="no"), hold=Hold(0.1, 1.0)))
    assert refused.reason == "cannot be stacked: no" + free


def test_jobs_that_keep_the_device_busy_are_not_stacked_unless_that_is_asked_for():
    made = candidate(3)
    busy = replace(made, specs=tuple(replace(spec, busy="one is enough") for spec in made.specs))
    assert choose(busy) == Choice("interleaved", "one is enough")
    assert choose(busy, "fused").together
    assert choose(busy, "isolated") == Choice("isolated", 'strategy="isolated" was asked for')
    assert choose(replace(busy, refusal="no")) == Choice("interleaved", "one is enough")
    [(_, alone)] = choose_all([replace(busy, specs=busy.specs[:1])], "auto", lambda _: None)
    assert alone.reason == "no other job has its structure"
