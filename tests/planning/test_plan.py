"""The plan and how it explains itself."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest

from carpool.errors import BudgetError, FusionError
from carpool.memory.estimate import CHECKED_BYTES, Footprint
from carpool.planning.cursor import Course
from carpool.planning.plan import Plan, make_plan
from carpool.planning.spec import ModelSpec
from carpool.planning.trials import Trial

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def spec(
    name: str,
    structure: str = "net",
    course: tuple[int, int, int] = (8, 4, 2),
    state_bytes: int = 3 * KIB,
    step_bytes: int = KIB,
    data: tuple[tuple[Hashable, int], ...] = (("x", 2 * MIB),),
    budget_bytes: int | None = None,
) -> ModelSpec:
    signature = (("model", structure),)
    return ModelSpec(name, "torch", signature, Course(*course), state_bytes, step_bytes, data, budget_bytes)


def planned(*specs: ModelSpec, refusal: str | None = None, free_bytes: int = 8 * GIB, **options: Any) -> Plan:
    return make_plan(specs, lambda members: refusal, device="cuda:0", free_bytes=free_bytes, **options)


def test_the_whole_explanation_of_a_small_plan():
    made = planned(
        spec("a"),
        spec("b", course=(10, 4, 2)),
        spec("c", "other"),
        rejected={"d": ValueError("no such file")},
    )
    assert made.explain() == "\n".join(
        [
            "4 jobs in 2 groups on cuda:0; 2 MiB of data, held once; 8.0 GiB free",
            "group 0: fused, 2 jobs: a, b",
            "  because 2 jobs of one structure: one launch advances all of them",
            "  2 MiB expected (4 KiB a member); launches: 4 of batch 4, 2 of batch 2; "
            "83 % of launched member-steps are useful",
            "group 1: interleaved, 1 job: c",
            "  because no other job has its structure (differs from 'a': 'model' is other, expected net)",
            "  2 MiB expected (4 KiB a member); launches: 4 of batch 4; "
            "100 % of launched member-steps are useful",
            "cannot run: d: ValueError: no such file",
        ]
    )
    assert str(made) == made.explain()


def test_one_job_is_not_many():
    assert planned(spec("a")).explain().startswith("1 job in 1 group on cuda:0;")


def test_many_names_are_shortened():
    made = planned(*(spec(f"lr={i}") for i in range(40)))
    assert "group 0: fused, 40 jobs: lr=0, lr=1, ... lr=39\n" in made.explain()


def test_memory_is_data_once_and_every_member():
    (group,) = planned(spec("a"), spec("b")).groups
    assert group.memory.total_bytes == 2 * MIB + 2 * 4 * KIB


def test_distinct_arrays_all_count():
    made = planned(spec("a", data=(("x", 10), ("y", 5))), spec("b", data=(("x", 10), ("z", 7))))
    assert made.data_bytes == 22


@pytest.mark.parametrize(
    ("size", "shown"), [(1000, "1000 B"), (2048, "2 KiB"), (5 * MIB, "5 MiB"), (3 * GIB // 2, "1.5 GiB")]
)
def test_bytes_are_shown_in_their_unit(size: int, shown: str):
    assert f"; {shown} free" in planned(spec("a", state_bytes=0, data=()), free_bytes=size).explain()


def test_a_structure_that_does_not_fit_at_once_is_cut_into_even_slices():
    room_for_four = 4 * 4 * KIB * 10 // 8
    made = planned(*(spec(str(i)) for i in range(10)), free_bytes=2 * MIB + room_for_four)
    assert [group.names for group in made.groups] == [
        ("0", "1", "2", "3"),
        ("4", "5", "6"),
        ("7", "8", "9"),
    ]
    assert {group.strategy for group in made.groups} == {"fused"}
    assert made.groups[0].reason.endswith("; 3 groups of about 4 fit the memory")


@pytest.mark.parametrize(
    ("room", "refusal", "asked"), [(10, None, [10]), (4, None, [4]), (1, None, []), (10, "no", [])]
)
def test_a_trial_is_asked_for_at_the_width_that_runs(room: int, refusal: str | None, asked: list[int]):
    found: list[int] = []

    def tried(specs: Any) -> Trial:
        found.append(len(specs))
        return Trial(len(specs), together_s=1.0, alone_s=1.0)

    free_bytes = 2 * MIB + room * 4 * KIB * 10 // 8
    made = planned(*(spec(str(i)) for i in range(10)), refusal=refusal, free_bytes=free_bytes, tried=tried)
    assert found == asked
    if asked:
        assert f"a step of {asked[0]} together takes 1 s" in made.groups[0].reason


def many(count: int, **options: Any) -> list[ModelSpec]:
    return [spec(str(i), course=(400, 4, 100), **options) for i in range(count)]


def test_the_explanation_says_how_long_chunks_are_where_a_launch_was_timed():
    tried = Trial(16, together_s=0.004, alone_s=0.002)
    alone = planned(*many(16), tried=lambda _: tried).explain()
    assert alone.endswith("member-steps are useful; chunks of 100 steps, about 400 ms each")
    beside = planned(*many(16), spec("x", "other"), tried=lambda _: tried).explain()
    assert "; chunks of 12 steps, about 48 ms each" in beside
    assert "chunks" not in planned(*many(16)).explain()
    assert "chunks" not in planned(*many(16), tried=lambda _: Trial(16, 0.004, 1e-9)).explain()


def test_what_fits_is_not_cut():
    made = planned(*(spec(str(i)) for i in range(10)))
    assert len(made.groups) == 1
    assert "fit the memory" not in made.groups[0].reason


def test_jobs_in_turn_are_groups_of_their_own():
    made = planned(spec("a"), spec("b"), strategy="in_turn")
    assert [(group.names, group.strategy) for group in made.groups] == [
        (("a",), "in_turn"),
        (("b",), "in_turn"),
    ]
    refused = planned(spec("a"), spec("b"), refusal="no")
    assert [group.reason for group in refused.groups] == ["cannot be stacked: no"] * 2


def test_groups_keep_the_order_of_the_jobs():
    made = planned(spec("a", "x"), spec("b", "y"), spec("c", "x"))
    assert [group.names for group in made.groups] == [("a", "c"), ("b",)]
    assert {group.adapter for group in made.groups} == {"torch"}


def test_fused_that_cannot_be_raises():
    with pytest.raises(FusionError, match="'model' is y, expected x"):
        planned(spec("a", "x"), spec("b", "x"), spec("c", "y"), strategy="fused")


def test_a_plan_of_rejected_jobs_only_says_so():
    made = planned(rejected={"a": KeyError("x")})
    assert made.groups == ()
    assert made.explain().splitlines()[0].startswith("1 job in 0 groups on cuda:0")
    assert made.explain().splitlines()[1] == "cannot run: a: KeyError: 'x'"


def test_jobs_alone_are_not_measured_where_each_of_them_fits_easily():
    asked: list[str] = []

    def footprint(specs: Any) -> Footprint:
        asked.append(specs[0].name)
        return Footprint(fixed_bytes=0, member_bytes=MIB)

    different = [spec(name, structure=name, state_bytes=MIB, data=()) for name in "abcdef"]
    planned(*different, free_bytes=9 * MIB, footprint=footprint)
    assert not asked
    planned(
        *different,
        spec("large", structure="large", state_bytes=4 * MIB),
        free_bytes=9 * MIB,
        footprint=footprint,
    )
    assert asked == ["large"]


def test_groups_are_measured_only_where_memory_is_scarce():
    asked: list[int] = []

    def footprint(specs: Any) -> Footprint:
        asked.append(len(specs))
        return Footprint(fixed_bytes=3 * MIB, member_bytes=8 * KIB, checked_bytes=KIB)

    (plenty,) = planned(spec("a"), spec("b"), free_bytes=GIB, footprint=footprint).groups
    assert not asked
    assert not plenty.memory.measured
    (scarce,) = planned(spec("a"), spec("b"), free_bytes=6 * MIB, footprint=footprint).groups
    assert asked == [2]
    assert scarce.memory.total_bytes == 3 * MIB + 2 * 8 * KIB + 2 * KIB
    assert (
        " measured (8 KiB a member)"
        in planned(spec("a"), spec("b"), free_bytes=6 * MIB, footprint=footprint).explain()
    )


def test_what_checking_takes_is_bounded():
    footprint = Footprint(fixed_bytes=0, member_bytes=MIB, checked_bytes=5 * MIB)
    made = planned(
        *(spec(str(i), state_bytes=MIB) for i in range(64)),
        free_bytes=96 * MIB,
        footprint=lambda _: footprint,
    )
    assert {group.memory.check_bytes for group in made.groups} == {CHECKED_BYTES}
    assert max(len(group.names) for group in made.groups) * MIB + CHECKED_BYTES <= 96 * MIB


SHORT = Footprint(fixed_bytes=3 * MIB, member_bytes=4 * MIB, checked_bytes=MIB)  # 8 MiB for one


@pytest.mark.parametrize("strategy", ["auto", "fused", "interleaved", "in_turn"])
def test_what_does_not_fit_is_not_said_to_fit(strategy: str):
    made = planned(*map(spec, "abc"), free_bytes=6 * MIB, footprint=lambda _: SHORT, strategy=strategy)
    told = made.explain()
    assert (
        told.count("  does not fit: 2 MiB more than is free; it would be tried with nothing else open") == 3
    )
    assert "groups of about" not in told
    assert {group.strategy for group in made.groups} == {"interleaved" if strategy == "auto" else strategy}


def test_one_job_that_does_not_fit_is_told_so_too():
    told = planned(spec("a"), free_bytes=6 * MIB, footprint=lambda _: SHORT).explain()
    assert told.count("does not fit: 2 MiB more than is free") == 1
    fits = planned(spec("a", state_bytes=MIB), free_bytes=9 * MIB, footprint=lambda _: SHORT)
    assert fits.groups[0].memory.total_bytes == 8 * MIB
    assert "does not fit" not in fits.explain()


def test_jobs_that_fit_one_at_a_time_only_are_not_called_a_stack():
    large = [spec(name, state_bytes=MIB) for name in "ab"]
    made = planned(*large, free_bytes=10 * MIB, footprint=lambda _: SHORT)
    assert [(group.names, group.strategy) for group in made.groups] == [
        (("a",), "interleaved"),
        (("b",), "interleaved"),
    ]
    assert made.groups[0].reason == "2 jobs of one structure, but no two of them fit the memory stacked"
    assert "does not fit" not in made.explain()


def test_a_job_that_can_never_fit_is_refused_with_what_it_needs_and_what_there_is():
    with pytest.raises(
        BudgetError, match=r"Job 'b': Expected at least 4.0 GiB of memory.* 2.0 GiB available.*Remedy"
    ):
        planned(spec("a"), spec("b", "other", state_bytes=4 * GIB), free_bytes=2 * GIB)


@pytest.mark.parametrize(("measured", "needed"), [(None, "2 MiB"), (Footprint(0, 7 * MIB), "9 MiB")])
def test_a_budget_below_the_need_is_refused(measured: Footprint | None, needed: str):
    with pytest.raises(
        BudgetError, match=f"Job 'a': Expected a budget of at least {needed}. Received: 2 MiB"
    ):
        planned(spec("a", budget_bytes=2 * MIB), footprint=lambda _: measured)


def test_a_budget_that_suffices_is_fine():
    (group,) = planned(spec("a", budget_bytes=9 * MIB), footprint=lambda _: Footprint(0, 7 * MIB)).groups
    assert group.memory.measured


def test_jobs_that_keep_the_device_busy_are_planned_apart_and_nothing_is_traced_or_timed_for_a_stack():
    def asked(*_: Any) -> None:
        pytest.fail("asked")

    jobs = [replace(spec(name), busy="one is enough") for name in "abc"]
    made = make_plan(jobs, asked, device="cuda:0", free_bytes=8 * GIB, tried=asked)
    assert [(group.strategy, group.names) for group in made.groups] == [
        ("interleaved", (name,)) for name in "abc"
    ]
    assert "because one is enough" in made.explain()
    assert [group.names for group in planned(*jobs, strategy="fused").groups] == [("a", "b", "c")]
    with pytest.raises(FusionError, match="no rule"):
        planned(*jobs, strategy="fused", refusal="no rule")
