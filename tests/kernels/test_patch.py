"""Names of modules that are others for a while: in one thread, whoever else trains meanwhile."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch.utils import checkpoint

from carpool.kernels.patch import patched
from carpool.kernels.table import alone, batched_or_refused
from drawing import at_once
from patience import PATIENCE_S


def module() -> Any:
    made: Any = ModuleType("made")
    made.word = lambda: "first"
    return made


def overlapping(first: Any, second: Any, look: Any) -> tuple[Any, Any, Any]:
    """Two threads whose contexts overlap, the first to come the first to leave; what each sees, and what a third sees."""
    came, left = threading.Event(), threading.Event()
    both, seen = threading.Event(), threading.Event()

    def one() -> Any:
        with first:
            came.set()
            assert both.wait(PATIENCE_S)
            found = look()
            assert seen.wait(PATIENCE_S)
        left.set()
        return found

    def other() -> Any:
        assert came.wait(PATIENCE_S)
        with second:
            both.set()
            assert left.wait(PATIENCE_S)
            return look()

    def third() -> Any:
        assert both.wait(PATIENCE_S)
        found = look()
        seen.set()
        return found

    a, b, c = at_once(one, other, third)
    return a, b, c


def test_a_name_is_another_inside_and_what_it_was_outside():
    made = module()
    before = made.word
    with patched(made, word=lambda: "second"):
        with patched(made, word=lambda: "third"):
            assert made.word() == "third"
        assert made.word() == "second"
    assert made.word is before


def test_each_thread_sees_its_own_and_the_others_what_it_was():
    made = module()
    before = made.word
    patches = patched(made, word=lambda: "one"), patched(made, word=lambda: "other")
    assert overlapping(*patches, lambda: made.word()) == ("one", "other", "first")
    assert made.word is before


def test_a_class_keeps_its_attributes_for_the_other_threads():
    class First:
        apply = "first"

    class Second:
        apply = "second"

    made = module()
    made.kind = First
    patches = patched(made, kind=Second), patched(made, word=lambda: "other")
    assert overlapping(*patches, lambda: made.kind.apply) == ("second", "first", "first")
    assert made.kind is First


def test_jobs_that_step_in_two_threads_leave_torchs_checkpoints_as_they_were():
    before = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    overlapping(alone(1, 0), alone(2, 0), lambda: None)
    assert (checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator) == before


def test_two_threads_that_stack_leave_vmaps_fallback_as_it_was():
    def fallback() -> bool:
        return functorch._is_vmap_fallback_enabled()

    before = fallback()
    assert overlapping(batched_or_refused(), batched_or_refused(), fallback) == (False, False, False)
    assert fallback() is before
    torch.vmap(lambda x: x * 2)(torch.ones(3))
