"""The promise as tests: a job's result does not depend on its neighbours, their order or the strategy.

An adapter's test class inherits `AdapterConformance`, names its zoo and writes one plain training loop (`reference`)
in its own framework, without carpool: that loop is what results are held against. Random layers are compared with the
same job alone instead, because no framework's own generator is keyed by job.
"""

from __future__ import annotations

from abc import abstractmethod
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import carpool
from carpool.job import Job
from carpool.planning.widths import spread
from carpool.result import Outcome, Result, Results
from carpool.testing.pairs import pairwise

DOUBLE = 1e-8
"""float64: how far weights may differ after 100 steps, absolutely."""
SINGLE = 1e-4
"""float32: how far weights may differ after 100 steps, relative to the largest; also the loss curve's rtol."""


@dataclass(frozen=True)
class Variant:
    """One member's own hyper-parameters; jobs built from different variants must still fuse."""

    seed: int = 0
    scale: float = 1.0
    """What the learning rate is multiplied by, where a stack may hold several."""
    epochs: int = 12
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `carpool.Job` on top."""


@dataclass(frozen=True)
class Reference:
    """What a plain loop left: weights and buffers by name, optimizer slots by weight, learning rates, loss by epoch."""

    weights: Mapping[str, np.ndarray]
    slots: Mapping[str, Mapping[str, np.ndarray]]
    rates: Sequence[float]
    history: Sequence[float]


VARIANTS = (Variant(0, 1.0), Variant(1, 0.5), Variant(2, 1.5))


class AdapterConformance:
    """Inherit this, fill in the zoo, write `job`, `reference` and `left`."""

    models: Sequence[str] = ()
    optimizers: Sequence[str] = ()
    schedulers: Sequence[str] = ()
    random_models: Sequence[str] = ()
    """Models with random layers: compared with the job alone, not with the plain loop."""
    alone: str = "in_turn"
    """The strategy that stands for the job alone in that comparison: one that draws the random numbers of a stack."""
    single_models: Sequence[str] = ()
    """Models that the framework itself rounds to float32 on the way: compared in float32, never in float64."""
    fuses: Sequence[str] = ()
    """The models that fuse: one that leaves this list, or joins it unsaid, fails a test."""
    clip_norms: Sequence[float] = (0.05, 0.5, 5.0)
    """What members of one stack clip at; empty where jobs have no `clip_norm` because the framework's optimizers clip."""
    ends_at_nan: Outcome = Outcome.DIVERGED
    """How a job ends whose loss is not finite: COMPLETED where the framework goes on, and so does its job."""
    models_change: bool = True
    """Whether training changes the model that was passed; where models cannot change, the result is another of the same kind."""
    fast_cases: int | None = None
    """How many cases of each test are in the fast suite, where every case compiles anew; the others are marked slow."""
    compile: str | bool = False
    """How fused steps are made, as `train` takes it."""
    fast_pairs: int | None = None
    """How many pairs are, spread evenly over them; the others are marked slow."""
    fast_every: int = 1
    """Of the cases of a test that are not pairs, every so many is, beginning at another one for each test."""
    device: str = "cpu"

    @abstractmethod
    def job(self, model: str, optimizer: str, scheduler: str, variant: Variant, double: bool = True) -> Job:
        """A job of the zoo, in float64 or float32. Equal arguments give equal data objects."""

    @abstractmethod
    def reference(self, job: Job) -> Reference:
        """A plain hand-written loop over `carpool.batch_order`, with none of carpool's own steps."""

    @abstractmethod
    def left(self, result: Result) -> Reference:
        """What carpool left in the user's objects, in the same form."""

    # How tests get their cases

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        cases = self._cases(metafunc.function.__name__)
        names = [name for name in ("model", "optimizer", "scheduler") if name in metafunc.fixturenames]
        if names:  # no cases: pytest skips the test, and says so
            rows = list(dict.fromkeys(tuple(case[name] for name in names) for case in cases))
            fast = self._fast(metafunc.function.__name__, len(rows))
            marks = [() if place in fast else pytest.mark.slow for place in range(len(rows))]
            params = [
                pytest.param(*row, id="-".join(row), marks=mark)
                for row, mark in zip(rows, marks, strict=True)
            ]
            metafunc.parametrize(names, params)

    def _fast(self, test: str, count: int) -> set[int]:
        """Which of a test's cases are in the fast suite."""
        first = range(count if self.fast_cases is None else min(count, self.fast_cases))
        if "pairwise" not in test or self.fast_pairs is None:
            every = self.fast_every if len(first) > self.fast_every else 1
            return {place for place in first if (place + len(test)) % every == 0}
        return set(spread(first, self.fast_pairs))

    def _cases(self, test: str) -> list[dict[str, str]]:
        plain = [model for model in self.models if model not in self.random_models]
        axes = {"model": plain, "optimizer": list(self.optimizers), "scheduler": list(self.schedulers)}
        if "pairwise" in test:
            return pairwise(axes)
        if "full_cross" in test:
            return [dict(zip(axes, row, strict=True)) for row in product(*axes.values())]
        if "random" in test:
            return [
                {"model": m, "optimizer": self.optimizers[0], "scheduler": self.schedulers[0]}
                for m in self.random_models
            ]
        if "clipping" in test and not self.clip_norms:
            return []
        if "every_optimizer" in test:
            return [
                {"model": plain[0], "optimizer": o, "scheduler": self.schedulers[0]} for o in self.optimizers
            ]
        everything = [*plain, *self.random_models] if "any_model" in test else plain
        if "changes_no_bit" in test:
            everything = [model for model in everything if model in self.fuses]
        return [
            {"model": m, "optimizer": self.optimizers[-1], "scheduler": self.schedulers[0]}
            for m in everything
        ]

    # What is held against what

    def run(self, jobs: Sequence[Job], **options: Any) -> Results:
        settings = {"device": self.device, "reporters": [], "compile": self.compile, **options}
        results = carpool.train(jobs, **settings)
        for result in results:
            if result.error is not None:
                raise result.error
        return results

    def jobs(
        self, model: str, optimizer: str, scheduler: str, double: bool | None = None, **changes: Any
    ) -> list[Job]:
        """Three members that differ in seed and learning rate."""
        wide = self.double(model) if double is None else double
        return [
            self.job(model, optimizer, scheduler, _changed(variant, changes), wide) for variant in VARIANTS
        ]

    def double(self, model: str) -> bool:
        """Whether the model is compared in float64, in tests that do not say."""
        return model not in self.single_models

    def strategy(self, model: str) -> str:
        return "fused" if model in self.fuses else "auto"

    def assert_like_reference(self, jobs: Sequence[Job], results: Results, double: bool) -> None:
        for job, result in zip(jobs, results, strict=True):
            assert_close(self.left(result), self.reference(job), double)
            assert result.outcome is Outcome.COMPLETED

    # The promise

    def test_equals_the_plain_loop_pairwise(self, model: str, optimizer: str, scheduler: str) -> None:
        jobs = self.jobs(model, optimizer, scheduler)
        self.assert_like_reference(jobs, self.run(jobs, strategy=self.strategy(model)), self.double(model))

    @pytest.mark.slow
    def test_equals_the_plain_loop_full_cross(self, model: str, optimizer: str, scheduler: str) -> None:
        jobs = self.jobs(model, optimizer, scheduler, epochs=25)
        self.assert_like_reference(jobs, self.run(jobs, strategy=self.strategy(model)), self.double(model))

    def test_equals_the_plain_loop_in_single_precision(self, model: str) -> None:
        jobs = self.jobs(model, self.optimizers[0], self.schedulers[0], double=False, epochs=25)
        self.assert_like_reference(jobs, self.run(jobs), double=False)

    def test_equals_the_plain_loop_in_turn(self, model: str) -> None:
        jobs = self.jobs(model, self.optimizers[-1], self.schedulers[-1])
        self.assert_like_reference(jobs, self.run(jobs, strategy="in_turn"), self.double(model))

    def test_fuses_what_the_list_says_any_model(self, model: str) -> None:
        plan = carpool.plan(self.jobs(model, self.optimizers[0], self.schedulers[0]), device=self.device)
        strategies = {group.strategy for group in plan.groups}
        assert strategies == ({"fused"} if model in self.fuses else {"interleaved"}), plan.explain()

    def test_random_layers_equal_the_job_alone(self, model: str) -> None:
        together = self.run(self.jobs(model, self.optimizers[0], self.schedulers[0]), strategy="fused")
        alone = self.run(self.jobs(model, self.optimizers[0], self.schedulers[0]), strategy=self.alone)
        for one, other in zip(together, alone, strict=True):
            assert_close(self.left(one), self.left(other), double=self.double(model))

    def test_clipping_equals_the_plain_loop_every_optimizer(self, optimizer: str) -> None:
        jobs = [
            self.job(
                self.models[0],
                optimizer,
                self.schedulers[0],
                _changed(variant, {"options": {"clip_norm": norm}}),
                self.double(self.models[0]),
            )
            for variant, norm in zip(VARIANTS, self.clip_norms, strict=True)
        ]
        self.assert_like_reference(jobs, self.run(jobs, strategy="fused"), self.double(self.models[0]))

    # Neighbours

    def test_order_does_not_matter_any_model(self, model: str) -> None:
        forward = self.run(self.jobs(model, self.optimizers[0], self.schedulers[0]))
        backward = self.run(self.jobs(model, self.optimizers[0], self.schedulers[0])[::-1])
        for one, other in zip(forward, list(backward)[::-1], strict=True):
            assert_close(self.left(one), self.left(other), double=self.double(model))

    def test_a_neighbour_that_leaves_changes_no_bit_any_model(self, model: str) -> None:
        stays = self.run(self.jobs(model, self.optimizers[0], self.schedulers[0]), strategy="fused")
        changed = self.jobs(model, self.optimizers[0], self.schedulers[0])
        short = Variant(1, 0.5, epochs=3)
        changed[1] = self.job(model, self.optimizers[0], self.schedulers[0], short, self.double(model))
        leaves = self.run(changed, strategy="fused")
        for place in (0, 2):
            assert_identical(self.left(stays[place]), self.left(leaves[place]))

    def test_a_neighbour_that_diverges_changes_no_bit(self, model: str) -> None:
        optimizer = self.optimizers[0]
        sound = self.run(self.jobs(model, optimizer, self.schedulers[0]), strategy="fused")
        changed = self.jobs(model, optimizer, self.schedulers[0])
        endless = Variant(1, float("inf"))
        changed[1] = self.job(model, optimizer, self.schedulers[0], endless, self.double(model))
        broken = carpool.train(
            changed, device=self.device, reporters=[], compile=self.compile, strategy="fused"
        )
        assert broken[1].outcome is self.ends_at_nan
        for place in (0, 2):
            assert_identical(self.left(sound[place]), self.left(broken[place]))

    # Failures

    @pytest.mark.parametrize("kind", [SystemExit, CancelledError, GeneratorExit])
    def test_what_ends_a_process_ends_its_job_alone(self, kind: type[BaseException]) -> None:
        """What a job's own code raises is that job's failure, and the others end as without it."""

        def leave(event: Any) -> None:
            raise kind

        kinds = (self.models[0], self.optimizers[0], self.schedulers[0])
        jobs = self.jobs(*kinds, epochs=3)
        jobs[1] = replace(jobs[1], callbacks=[leave])
        settings = {"device": self.device, "reporters": [], "compile": self.compile}
        results = carpool.train(jobs, **settings)
        assert [result.outcome for result in results] == [
            Outcome.COMPLETED,
            Outcome.FAILED,
            Outcome.COMPLETED,
        ]
        assert type(results[1].error) is kind
        assert len(results[1].history["loss"]) == 1

    # Results on disk

    def test_what_was_saved_is_read_back_every_optimizer(self, optimizer: str, tmp_path: Path) -> None:
        """Weights and the optimizer's state, to the bit, into a model of the same structure too."""
        jobs = self.jobs(self.models[0], optimizer, self.schedulers[0], epochs=2)
        results = self.run(jobs)
        results.save(tmp_path)
        read = carpool.load(tmp_path)
        for ours, theirs in zip(read, results, strict=True):
            assert len(theirs.weights) > 0
            assert _same(ours.weights, theirs.weights)
            assert _same(ours.optimizer_state, theirs.optimizer_state)
        loaded = read[1].load_into(results[0].model)
        again = replace(results[0], model=loaded).weights  # whose names may be another model's
        assert _same(list(again.values()), list(read[1].weights.values()))

    # Going on

    def test_a_live_model_goes_on_where_it_was_every_optimizer(self, optimizer: str) -> None:
        """Two calls of six epochs on one set of objects equal two plain loops over them."""
        jobs = self.jobs(self.models[0], optimizer, self.schedulers[0], epochs=6)
        first = self.run(jobs, strategy="fused")
        again = [self.continued(job, result) for job, result in zip(jobs, first, strict=True)]
        expected = [self.reference_continued(job) for job in jobs]
        for job, result, reference in zip(again, self.run(again, strategy="fused"), expected, strict=True):
            assert not self.models_change or result.model is job.model
            assert_close(self.left(result), reference, double=self.double(self.models[0]))

    @abstractmethod
    def continued(self, job: Job, result: Result) -> Job:
        """The same job on the live objects of its result."""

    @abstractmethod
    def reference_continued(self, job: Job) -> Reference:
        """The plain loop run twice over one set of objects."""


def _changed(variant: Variant, changes: Mapping[str, Any]) -> Variant:
    return Variant(**{"seed": variant.seed, "scale": variant.scale, **changes})


def assert_close(got: Reference, expected: Reference, double: bool) -> None:
    """Within the tolerances of the promise."""
    assert list(got.weights) == list(expected.weights)
    for name, value in expected.weights.items():
        largest = max(1e-3, float(np.abs(value).max(initial=0.0)))
        allowed = DOUBLE if double else SINGLE * largest
        np.testing.assert_allclose(got.weights[name], value, rtol=0, atol=allowed, err_msg=name)
    np.testing.assert_allclose(got.history, expected.history, rtol=DOUBLE if double else SINGLE, atol=1e-12)
    np.testing.assert_allclose(got.rates, expected.rates, rtol=1e-12)
    if double:
        _assert_slots(got.slots, expected.slots)


def _assert_slots(
    got: Mapping[str, Mapping[str, np.ndarray]], expected: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    assert set(got) == set(expected)
    for name, slots in expected.items():
        assert set(got[name]) == set(slots), name
        for slot, value in slots.items():
            allowed = max(1e-9, 1e-7 * float(np.abs(value).max(initial=0.0)))
            np.testing.assert_allclose(
                got[name][slot], value, rtol=1e-7, atol=allowed, err_msg=f"{name}.{slot}"
            )


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two nests of arrays and plain values are the same to the bit."""
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    if isinstance(ours, Mapping):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def assert_identical(got: Reference, expected: Reference) -> None:
    """Every bit the same."""
    for name, value in expected.weights.items():
        np.testing.assert_array_equal(got.weights[name], value, err_msg=name)
    assert list(got.history) == list(expected.history)
