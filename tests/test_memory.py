"""`memory=` and `budget=` of a run, against a simulated device: a CPU of which so much may be used."""

import re
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool.errors import BudgetError, OptionError
from carpool.events import GroupEnded, GroupStarted
from carpool.result import Outcome


def job(seed, hidden=256, **options):
    data = (options.pop("x", X), options.pop("y", Y))
    make = partial(_net, hidden)
    return carpool.Job(
        make,
        data,
        name=f"seed={seed}",
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        batch_size=16,
        seed=seed,
        **options,
    )


def _net(hidden):
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


X, Y = torch.randn(32, 64), torch.randint(0, 10, (32,))


def test_a_structure_is_cut_into_as_many_groups_as_the_memory_needs_and_all_of_them_finish():
    jobs = [job(seed) for seed in range(48)]
    plan = carpool.plan(jobs, device="cpu", memory="24MiB")
    assert len(plan.groups) > 1
    assert f"{len(plan.groups)} groups of about" in plan.explain()
    assert all(group.memory.total_bytes <= 24 << 20 for group in plan.groups)
    results = carpool.train(jobs, device="cpu", memory="24MiB", reporters=[], compile=False)
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    whole = carpool.train([job(seed) for seed in range(48)], device="cpu", reporters=[], compile=False)
    for cut, one in zip(results, whole, strict=True):
        assert cut.history["loss"] == pytest.approx(one.history["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("count", "memory", "side_by_side"),
    [(4, 1_000_000, 1), (16, 2_000_000, 10)],  # what each takes was measured, and told by arithmetic
)
def test_groups_that_do_not_fit_beside_one_another_wait(count, memory, side_by_side):
    held = []

    class Watch:
        def __init__(self):
            self.open = 0

        def __call__(self, event):
            if isinstance(event, GroupStarted):
                self.open += 1
                held.append(self.open)
            elif isinstance(event, GroupEnded):
                self.open -= 1

    jobs = [job(i, hidden=128 + i) for i in range(count)]  # no two have one structure
    needed = [group.memory.total_bytes for group in carpool.plan(jobs, device="cpu", memory=memory).groups]
    room = sum(total <= memory for total in accumulate(needed))
    assert room == side_by_side < count
    carpool.train(jobs, device="cpu", memory=memory, reporters=[Watch()])
    assert max(held) == room


@pytest.mark.parametrize("memory", ["12 bananas", "0", "120%"])
def test_what_is_no_amount_is_refused_before_anything_is_built(memory):
    def never():
        raise AssertionError("was built")

    bad = carpool.Job(never, (X, Y), loss=F.cross_entropy, optimizer=torch.optim.SGD)
    with pytest.raises(OptionError, match='Expected memory="auto", a size such as'):
        carpool.train([bad], device="cpu", memory=memory)


def test_a_budget_below_the_weights_is_refused_before_anything_runs():
    seen = []
    jobs = [job(0, callbacks=[seen.append]), job(1, budget="10KiB")]
    with pytest.raises(
        BudgetError, match=r"Job 'seed=1': Expected a budget of at least .* Received: 10 KiB. Remedy"
    ):
        carpool.train(jobs, device="cpu", reporters=[])
    assert not seen


def test_a_budget_that_is_no_size_is_refused_when_the_job_is_written():
    with pytest.raises(OptionError, match="Job 'seed=0': budget as a size"):
        job(0, budget="12 bananas")


def test_a_job_that_can_never_fit_is_refused_with_needed_and_available_bytes():
    with pytest.raises(
        BudgetError, match=r"Expected at least \d\d\d KiB of memory.*Received: 100 KiB available"
    ):
        carpool.train([job(0, hidden=512)], device="cpu", memory="100KiB", reporters=[])


def test_a_plan_for_less_than_one_job_takes_says_so_and_by_how_much():
    x, y = torch.randn(2000, 64), torch.randint(0, 10, (2000,))
    wide = [replace(job(seed, x=x, y=y), batch_size=2000) for seed in range(3)]
    told = carpool.plan(wide, device="cpu", memory="1MiB").explain()
    assert re.search(r"does not fit: \d+ MiB more than is free", told)
    assert "groups of about" not in told
    with pytest.raises(BudgetError, match="1000 B available"):
        carpool.plan(wide, device="cpu", memory=1000)


@pytest.mark.slow
def test_512_members_in_4_gib():
    x, y = torch.randn(64, 512), torch.randint(0, 10, (64,))

    def large(seed):
        make = lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))  # noqa: E731
        optimizer = partial(torch.optim.Adam, lr=1e-3)
        return carpool.Job(make, (x, y), name=str(seed), loss=F.cross_entropy, optimizer=optimizer, seed=seed)

    jobs = [large(seed) for seed in range(512)]
    plan = carpool.plan(jobs, device="cpu", memory="4GiB", strategy="fused")
    assert len(plan.groups) > 1
    assert f"{len(plan.groups)} groups of about" in plan.explain()
    results = carpool.train(jobs, device="cpu", memory="4GiB", strategy="fused", reporters=[], compile=False)
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
