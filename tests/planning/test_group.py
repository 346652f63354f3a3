"""Which jobs could run together, and the sentence for one that could not."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from carpool.planning.cursor import Course
from carpool.planning.group import candidates
from carpool.planning.spec import ModelSpec, difference

NET = (("fc1.weight", (32, 10)), ("act", "ReLU"), ("fc2.weight", (1, 32)))


def spec(
    name: str, signature: Sequence[tuple[str, Hashable]] = NET, adapter: str = "torch", length: int = 8
) -> ModelSpec:
    return ModelSpec(name, adapter, tuple(signature), Course(length, 4, 1), 1, 1)


def changed(label: str, value: Hashable) -> tuple[tuple[str, Hashable], ...]:
    return tuple((key, value if key == label else old) for key, old in NET)


# Grouping


def test_equal_signatures_make_one_candidate_in_the_order_given():
    other = changed("act", "Tanh")
    made = candidates([spec("a"), spec("b", other), spec("c"), spec("d", other)], lambda members: None)
    assert [[s.name for s in candidate.specs] for candidate in made] == [["a", "c"], ["b", "d"]]


def test_data_lengths_and_epochs_do_not_part_them():
    (only,) = candidates([spec("a", length=8), spec("b", length=100)], lambda members: None)
    assert len(only.specs) == 2


def test_jobs_of_two_frameworks_are_never_one_candidate():
    assert len(candidates([spec("a"), spec("b", adapter="jax")], lambda members: None)) == 2


def test_the_refusal_is_asked_once_for_each_structure_with_company():
    asked: list[list[str]] = []

    def refusal(members: Sequence[ModelSpec]) -> str | None:
        asked.append([member.name for member in members])
        return "no"

    made = candidates([spec("a"), spec("b"), spec("c", changed("act", "Tanh"))], refusal)
    assert asked == [["a", "b"]]
    assert [candidate.refusal for candidate in made] == ["no", None]


def test_a_stranger_is_told_how_it_differs_from_what_most_have():
    made = candidates([spec("x", changed("act", "Tanh")), spec("a"), spec("b")], lambda members: None)
    assert made[0].stranger == "differs from 'a': 'act' is Tanh, expected ReLU"
    assert made[1].stranger is None


def test_without_jobs_there_are_no_candidates():
    assert candidates([], lambda members: None) == ()


# The sentence


def test_equal_structures_do_not_differ():
    assert difference(spec("a"), spec("b")) is None


def test_the_first_difference_is_named_with_both_values():
    wide = changed("fc1.weight", (64, 10))
    assert difference(spec("a"), spec("b", wide)) == "'fc1.weight' is (64, 10), expected (32, 10)"


def test_a_missing_entry_is_named():
    assert difference(spec("a"), spec("b", NET[:-1])) == "it has no 'fc2.weight'"


def test_an_extra_entry_is_named():
    longer = (*NET, ("fc3.weight", (1, 1)))
    assert difference(spec("a"), spec("b", longer)) == "it has 'fc3.weight', which 'a' has not"


def test_another_framework_is_named():
    assert difference(spec("a"), spec("b", adapter="jax")) == "it is a jax job, expected a torch one"


def test_long_values_are_shortened():
    told = difference(spec("a", [("code", "x" * 500)]), spec("b", [("code", "y" * 500)]))
    assert told == f"'code' is {'y' * 77}..., expected {'x' * 77}..."
