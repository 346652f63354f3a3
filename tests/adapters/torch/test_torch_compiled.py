"""Compiled steps keep the promise, and are remembered."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from zoo import TorchZoo

import carpool
from carpool.adapters.torch import fuse, program
from carpool.adapters.torch.fused import StackedSession
from carpool.adapters.torch.solo import SoloSession
from carpool.adapters.torch.train import TorchAdapter
from carpool.events import GroupCompiled, GroupVerified
from carpool.kernels import pool
from carpool.testing import AdapterConformance, Variant
from carpool.testing.conformance import assert_close, assert_identical

ZOO = type("Zoo", (TorchZoo, AdapterConformance), {})()


def jobs(model: str, scale: float = 1.0) -> list[carpool.Job]:
    return [ZOO.job(model, "adamw", "cosine_by_step", Variant(seed, scale * (1 + seed))) for seed in range(3)]


@pytest.mark.parametrize(
    "model",
    [pytest.param(one, marks=pytest.mark.slow) for one in ("batch_norm", "conv", "dropout")] + ["conv_norm"],
)
def test_a_compiled_group_equals_the_jobs_alone(model):
    together = ZOO.run(jobs(model), compile=True, strategy="fused")
    alone = ZOO.run(jobs(model), strategy="in_turn")
    for one, other in zip(together, alone, strict=True):
        assert_close(ZOO.left(one), ZOO.left(other), double=True)


class Ragged(nn.Module):
    """Pools what a convolution leaves, with a row and a column too many."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.head = nn.Conv2d(1, 3, 3).double(), nn.Linear(27, 3).double()

    def forward(self, x):
        return self.head(nn.functional.max_pool2d(self.convolve(x), 2).relu().flatten(1))


@pytest.mark.slow
def test_ragged_pooling_is_compiled_though_the_program_compiled_before(monkeypatch):
    torch.compile(lambda x: x + 1)(torch.ones(2))  # Inductor has read its tables
    x, y = torch.randn(32, 1, 9, 9, dtype=torch.float64), torch.arange(32) % 3
    made = [
        carpool.Job(
            Ragged,
            (x, y),
            loss=nn.functional.cross_entropy,
            optimizer=torch.optim.Adam,
            batch_size=16,
            epochs=2,
            seed=seed,
        )
        for seed in range(3)
    ]
    alone = ZOO.run(made, strategy="in_turn")
    monkeypatch.setattr(pool, "_kernels", lambda sides: pytest.fail("runs uncompiled"))
    with fresh_cache():
        together = ZOO.run(made, compile=True, strategy="fused")
    for one, other in zip(together, alone, strict=True):
        assert_close(ZOO.left(one), ZOO.left(other), double=True)


@pytest.mark.parametrize(
    "model", [pytest.param("batch_norm", marks=pytest.mark.slow), "conv_norm", "dropout"]
)
def test_rows_that_are_traced_one_by_one_equal_the_jobs_alone(monkeypatch, model):
    monkeypatch.setattr(fuse, "is_apart", lambda rows, convolves, device: True)
    apart = ZOO.run(jobs(model), strategy="fused", compile=False)
    traced = next(reversed(program._memory.values())).traced
    assert not any("bmm" in str(node.target) for node in traced.graph.nodes)
    alone = ZOO.run(jobs(model), strategy="in_turn")
    for one, other in zip(apart, alone, strict=True):
        assert_close(ZOO.left(one), ZOO.left(other), double=True)


@pytest.mark.slow
def test_a_job_alone_that_is_compiled_equals_its_ordinary_steps():
    events: list = []
    [compiled] = carpool.train(jobs("mlp")[:1], device="cpu", compile=True, reporters=[events.append])
    [alone] = ZOO.run(jobs("mlp")[:1], strategy="in_turn")
    assert any(isinstance(event, GroupVerified) for event in events)
    assert_close(ZOO.left(compiled), ZOO.left(alone), double=True)


@pytest.mark.parametrize(("compile", "kind"), [(True, StackedSession), ("auto", SoloSession)])
def test_a_job_alone_is_a_stack_of_one_where_it_is_to_be_compiled(compile, kind):
    adapter, one = TorchAdapter(compile=compile), replace(jobs("mlp")[0], name="one")
    adapter.describe(one)
    for plain, expected in ((False, kind), (True, SoloSession)):
        session = adapter.open(one, "cpu", plain=plain)
        assert type(session) is expected
        session.close()


def test_a_job_alone_is_traced_in_its_models_own_shapes():
    def operators(members: int) -> set[str]:
        adapter = TorchAdapter(compile=True)
        several = [replace(job, name=f"job {place}") for place, job in enumerate(jobs("mlp")[:members])]
        for job in several:
            adapter.describe(job)
        assert adapter.fuser is not None
        assert adapter.fuser.refusal(several) is None
        traced = next(reversed(program._memory.values())).traced
        return {str(node.target) for node in traced.graph.nodes}

    assert "aten.addmm.default" in operators(1)
    assert "aten.bmm.default" not in operators(1)
    assert "aten.bmm.default" in operators(2)


@pytest.mark.parametrize(
    ("options", "quick"), [({}, True), ({"plain": True}, True), ({"exact": True}, False)]
)
def test_a_job_alone_has_fused_kernels_lent_unless_it_is_to_be_exact(options, quick):
    adapter, one = TorchAdapter(), replace(jobs("mlp")[0], name="one")
    adapter.describe(one)
    session = adapter.open(one, "cpu", **options)
    assert isinstance(session, SoloSession)
    assert bool(session._quick) is quick
    session.close()


def test_a_neighbour_that_leaves_changes_no_bit_compiled():
    stays = ZOO.run(jobs("conv_norm"), compile=True, strategy="fused")
    changed = jobs("conv_norm")
    changed[1] = ZOO.job("conv_norm", "adamw", "cosine_by_step", Variant(1, 2.0, epochs=3))
    leaves = ZOO.run(changed, compile=True, strategy="fused")
    for place in (0, 2):
        assert_identical(ZOO.left(stays[place]), ZOO.left(leaves[place]))


def test_the_second_sweep_of_a_structure_compiles_nothing(monkeypatch):
    ZOO.run(jobs("mlp"), compile=True)
    compiled: list = []
    monkeypatch.setattr(program, "compiled", lambda asked: compiled.append(asked))
    events: list = []
    results = carpool.train(jobs("mlp", scale=0.3), device="cpu", compile=True, reporters=[events.append])
    assert not compiled
    assert all(event.compiled for event in events if isinstance(event, GroupCompiled))
    assert all(result.error is None for result in results)


def test_what_was_compiled_for_another_run_is_not_run_where_nothing_may_be_compiled():
    ZOO.run(jobs("mlp"), compile=True)
    events: list = []
    carpool.train(jobs("mlp"), device="cpu", compile=False, strategy="fused", reporters=[events.append])
    prepared = [event.compiled for event in events if isinstance(event, GroupCompiled)]
    assert prepared
    assert not any(prepared)


def test_where_compiling_fails_the_step_runs_uncompiled_and_says_so(monkeypatch):
    def no_compiler(asked):
        raise RuntimeError("no C++ compiler")

    program._memory.clear()
    monkeypatch.setattr(program, "compiled", no_compiler)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        results = carpool.train(jobs("mlp"), device="cpu", compile=True, reporters=[])
    program._memory.clear()
    alone = ZOO.run(jobs("mlp"), strategy="in_turn")
    for one, other in zip(results, alone, strict=True):
        assert_close(ZOO.left(one), ZOO.left(other), double=True)


def test_short_jobs_are_not_compiled():
    program._memory.clear()
    events: list = []
    carpool.train(jobs("mlp"), device="cpu", compile="auto", reporters=[events.append])
    prepared = [event for event in events if isinstance(event, GroupCompiled)]
    assert prepared
    assert not any(event.compiled for event in prepared)


def test_a_first_row_that_failed_does_not_keep_the_others_from_being_compiled():
    x, bad = torch.randn(16, 3), torch.zeros(16, dtype=torch.int64)
    bad[0] = 7
    made = [
        carpool.Job(
            lambda: nn.Linear(3, 2),
            (x, bad if i == 0 else torch.zeros(16, dtype=torch.int64)),
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            batch_size=4,
            shuffle=False,
            seed=i,
            name=str(i),
        )
        for i in range(4)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = carpool.train(made, device="cpu", strategy="fused", compile=True, reporters=[])
    assert [r.outcome.word for r in results] == ["failed", *["completed"] * 3]
