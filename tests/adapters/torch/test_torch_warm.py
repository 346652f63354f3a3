"""A second call of jobs like those before: what was found out is remembered, and nothing of the user's is kept or shared."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool import ambient
from carpool.adapters.torch import programs
from carpool.adapters.torch import train as adapter
from carpool.adapters.torch.threads import Threads
from carpool.events import Event, GroupCompiled
from carpool.windows import Measured

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1).gt(0).long()
Counted = Callable[[Any, str], list[Any]]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


def jobs(count: int = 3, **changes: Any) -> list[carpool.Job]:
    given: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "batch_size": 8,
        "epochs": 2,
    }
    return [carpool.Job(net, (X, Y), name=str(seed), seed=seed, **(given | changes)) for seed in range(count)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Notes the calls of a module's function, which goes on doing what it does."""

    def count(module: Any, name: str) -> list[Any]:
        calls: list[Any] = []
        function = getattr(module, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, noting)
        return calls

    return count


# What is remembered


def test_a_structure_is_probed_once_in_a_process(counted: Counted):
    carpool.train(jobs(), device="cpu", strategy="fused", reporters=[])
    probed = counted(adapter, "probe")
    carpool.train(jobs(), device="cpu", strategy="fused", reporters=[])
    assert not probed
    carpool.train(jobs(batch_size=6), device="cpu", strategy="fused", reporters=[])
    assert len(probed) == 1


def test_a_step_that_could_not_be_probed_is_probed_again(counted: Counted):
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        return loss if loss.item() > 0 else 2 * loss

    probed = counted(adapter, "probe")
    for _ in range(2):
        carpool.train(jobs(loss=None, step=step), device="cpu", reporters=[])
    assert len(probed) == 2


def test_what_is_remembered_keeps_no_model_and_no_data():
    class Marked(nn.Linear):
        pass

    x, y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)
    made = [
        carpool.Job(partial(Marked, 6, 2), (x, y), seed=seed, loss=F.cross_entropy, optimizer=torch.optim.SGD)
        for seed in range(2)
    ]
    results = carpool.train(made, device="cpu", strategy="fused", reporters=[], compile=False)
    seen = [weakref.ref(x), *(weakref.ref(result.model) for result in results)]
    del results, made, x, y
    gc.collect()
    assert [one() for one in seen] == [None] * 3


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_machine_code_that_was_faster_is_taken_without_timing_it(monkeypatch: pytest.MonkeyPatch):
    timed: list[int] = []

    def measured(ways: Any) -> Measured:
        timed.append(len(ways))
        return Measured((1.0, 1e-4), agrees=True, busy=False)

    monkeypatch.setattr(programs, "FEWEST_LAUNCHES", 1)
    monkeypatch.setattr(programs, "machine_guess_s", lambda code: 0.0)
    monkeypatch.setattr(programs, "measured", measured)
    monkeypatch.setattr(programs, "_LEAST_OPERATOR_S", 0.0)  # nothing is so fast that it needs no timing
    monkeypatch.setattr(programs, "_MOST_FLOPS", float("inf"))
    programs._paces.clear()
    forms: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, GroupCompiled):
            forms.append(event.form)

    def run(count: int) -> None:
        carpool.train(jobs(count), device="cpu", strategy="fused", reporters=[note])

    try:
        run(3)
        assert len(timed) == 1
        run(3)
        assert len(timed) == 1
        run(4)  # a wider stack is timed for itself
        assert len(timed) == 2
        assert forms == ["resident"] * 3
    finally:
        programs._paces.clear()


# What a user could see


def test_members_share_no_memory_and_hold_none_but_their_own():
    results = carpool.train(jobs(), device="cpu", strategy="fused", reporters=[])
    owners: dict[int, str] = {}
    for result in results:
        assert isinstance(result.model, nn.Module)
        slots = [one for own in result.optimizer.state.values() for one in own.values()]  # type: ignore[union-attr]
        for tensor in (*result.model.parameters(), *result.model.buffers(), *slots):
            held = tensor.untyped_storage()
            assert held.nbytes() == tensor.nbytes
            assert owners.setdefault(held.data_ptr(), f"{result.name} {id(tensor)}").endswith(str(id(tensor)))


def test_slots_lie_in_memory_as_their_parameters_do():
    def convolving() -> nn.Module:
        made = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 2))
        return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    x, y = torch.randn(8, 2, 4, 4), torch.zeros(8, dtype=torch.long)
    adam = partial(torch.optim.Adam, lr=0.01)
    made = [carpool.Job(convolving, (x, y), seed=s, loss=F.cross_entropy, optimizer=adam) for s in range(2)]
    for result in carpool.train(made, device="cpu", strategy="fused", reporters=[], compile=False):
        for parameter, slots in result.optimizer.state.items():  # type: ignore[union-attr]
            assert slots["exp_avg"].stride() == parameter.stride()


def test_an_optimizer_draws_from_the_seed_whatever_its_model_drew():
    drawn: list[float] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        drawn.append(float(torch.rand(())))
        return torch.optim.SGD(parameters, lr=0.1)

    before = torch.get_rng_state()
    carpool.train(jobs(2, optimizer=optimizer, epochs=1), device="cpu", reporters=[])
    assert torch.equal(torch.get_rng_state(), before)
    for seed in range(2):
        with ambient.seeded(seed):
            assert float(torch.rand(())) == drawn[seed]


# Threads


def test_threads_of_one_member_and_beside_launches_are_put_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        threads = Threads(0, alone=1)
        with threads.inside():
            assert torch.get_num_threads() == 2
            with threads.of_one():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 2
        with threads.inside(beside=True):
            assert (torch.get_num_threads(), threads.most) == (1, 2)
            with threads.settled():
                assert torch.get_num_threads() == 2
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
