"""Steps as machine code, through the public API: each job ends as it does traced, and as alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import carpool
from carpool import machine
from carpool.adapters.torch import epochs, programs
from carpool.errors import FusionError
from carpool.events import Event, GroupCompiled, GroupFellBack
from carpool.kernels.resident.builder import Refused

pytestmark = pytest.mark.skipif(machine.unavailable() is not None, reason="needs a C compiler")

FEATURES, CLASSES = 12, 5
Change = Callable[[carpool.Job], carpool.Job]


def table(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (length,), generator=generator)


X, Y = table(75)
VALIDATION = table(21, 1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.ReLU(), nn.Linear(9, CLASSES)).double()


def accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.argmax(-1) == target).double().mean()


def job(seed: int, **options: Any) -> carpool.Job:
    made: dict[str, Any] = {
        "data": (X, Y),
        "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.Adam, lr=0.01 * (seed + 1)),
        "batch_size": 16,
        "epochs": 4,
        "seed": seed,
        "name": str(seed),
    }
    return carpool.Job(net, **{**made, **options})


def train(
    jobs: Sequence[carpool.Job], compile: str | bool = "resident"
) -> tuple[carpool.Results, list[Event]]:
    events: list[Event] = []
    results = carpool.train(jobs, device="cpu", strategy="fused", compile=compile, reporters=[events.append])
    assert not [event for event in events if isinstance(event, GroupFellBack)]
    return results, events


def forms(events: Sequence[Event]) -> set[str]:
    return {event.form for event in events if isinstance(event, GroupCompiled)}


def weights(result: carpool.Result) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in result.model.state_dict().values()]


def assert_same(some: carpool.Results, others: carpool.Results, within: float = 1e-10) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.outcome, one.steps, one.epoch) == (other.outcome, other.steps, other.epoch)
        for a, b in zip(weights(one), weights(other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=within)
        assert one.history.keys() == other.history.keys()
        for name, values in one.history.items():
            assert values == pytest.approx(other.history[name], rel=1e-9)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, CLASSES)).double()


def with_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 9, bias=False),
        nn.BatchNorm1d(9),
        nn.GELU(),
        nn.LayerNorm(9),
        nn.Linear(9, CLASSES),
    ).double()


CASES: dict[str, Change] = {
    "plain": lambda job: job,
    "validated": lambda job: replace(job, validation_data=VALIDATION, metrics={"accuracy": accuracy}),
    "uneven": lambda job: replace(job, index=range(20 + 17 * int(job.seed)), epochs=2 + int(job.seed)),
    "accumulated": lambda job: replace(job, accumulate=2),
    "clipped": lambda job: replace(job, clip_norm=0.05),
    "both": lambda job: replace(job, accumulate=3, clip_norm=0.05),
    "by epoch": lambda job: replace(job, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1)),
    "by step": lambda job: replace(
        job,
        scheduler=carpool.Schedule(
            partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20), every="step"
        ),
    ),
    "stopped early": lambda job: replace(
        job,
        epochs=12,
        validation_data=VALIDATION,
        stop=carpool.EarlyStopping("val_loss", patience=1, restore_best=True),
    ),
    "dropout": lambda job: replace(job, model=with_dropout),
    "norms": lambda job: replace(job, model=with_norm, validation_data=VALIDATION),
    "momentum": lambda job: replace(
        job, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    ),
    "tally": lambda job: replace(job, optimizer=partial(torch.optim.NAdam, lr=0.01)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_job_ends_as_it_does_traced(case: str) -> None:
    jobs = [CASES[case](job(seed)) for seed in range(3)]
    found, events = train(jobs)
    assert forms(events) == {"resident"}
    assert_same(found, train(jobs, compile=False)[0])


def test_epochs_on_which_nothing_hangs_are_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    carry_out = epochs.carry_out

    def counted(blocks: Any, *rest: Any) -> None:
        launched.append(int((blocks["count"] * blocks["epochs"]).sum()))
        carry_out(blocks, *rest)

    monkeypatch.setattr(epochs, "carry_out", counted)
    train([job(seed, epochs=20, validation_data=VALIDATION) for seed in range(3)])
    # An epoch has its whole batches, its last, and validation's two. Of the first, what follows the whole batches is made ready.
    assert sum(launched) == 19 * 4 + 1
    assert len(launched) < 19


class Silent:
    """Hears nothing, so that nothing is told of single epochs."""

    hears: frozenset[type] = frozenset()

    def __call__(self, event: Event) -> None:
        raise AssertionError(event)


def quietly(jobs: Sequence[carpool.Job]) -> carpool.Results:
    return carpool.train(jobs, device="cpu", strategy="fused", compile="resident", reporters=[Silent()])


def assert_equal(some: carpool.Results, others: carpool.Results) -> None:
    """To the last bit."""
    for one, other in zip(some, others, strict=True):
        assert (one.outcome, one.steps, one.epoch) == (other.outcome, other.steps, other.epoch)
        assert repr(one.error) == repr(other.error)
        assert one.history == other.history
        assert all(map(torch.equal, weights(one), weights(other)))


STRETCHED: dict[str, Change] = {
    **{
        name: change for name, change in CASES.items() if name not in ("stopped early", "by epoch", "by step")
    },
    "by step": lambda job: replace(
        job,
        scheduler=carpool.Schedule(
            partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=30), every="step"
        ),
    ),
    "through the files": lambda job: replace(job, shuffle=False),
    "diverging": lambda job: replace(
        job, optimizer=partial(torch.optim.SGD, lr=10.0 if job.seed == 1 else 0.01, weight_decay=100.0)
    ),
    "raising": lambda job: replace(job, model=partial(Counting, 30 if job.seed == 1 else 0)),
}


class Counting(nn.Module):
    """Looks its steps up in a table, and raises where that ends."""

    count: Tensor
    table: Tensor

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("count", torch.tensor([begin]))
        self.register_buffer("table", torch.linspace(0.9, 1.1, 61, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1
        return self.net(x) * self.table[self.count]


@pytest.mark.parametrize("case", STRETCHED)
def test_whole_epochs_at_once_have_the_bits_of_chunk_after_chunk(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody hears of each epoch, where nobody does, and where each chunk is told by itself."""
    jobs = [replace(STRETCHED[case](job(seed)), epochs=12 + seed) for seed in range(3)]
    stretches: list[int] = []
    tell = epochs.Epochs.stretch

    def counted(self: Any, *given: Any) -> Any:
        told = tell(self, *given)
        stretches.append(told.stretch.epochs if told is not None else 0)
        return told

    monkeypatch.setattr(epochs.Epochs, "stretch", counted)
    quiet = quietly(jobs)
    assert max(stretches) > 1
    heard, _ = train(jobs)
    monkeypatch.setattr(epochs.Epochs, "stretch", lambda *_: None)
    chunks = quietly(jobs)
    assert_equal(quiet, chunks)
    assert_equal(heard, chunks)
    if case in ("diverging", "raising"):
        assert 10 < chunks[1].steps < 13 * 5
        assert chunks[1].outcome.word == {"diverging": "diverged", "raising": "failed"}[case]


def test_epochs_that_are_longer_than_a_launch_are_told_chunk_by_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    tell = epochs.Epochs.stretch
    monkeypatch.setattr(epochs.Epochs, "stretch", lambda *given: told.append(tell(*given)))
    monkeypatch.setattr(epochs, "LAUNCH_S", 1e-9)
    quietly([job(seed, epochs=6) for seed in range(2)])
    assert told
    assert not any(told)


def test_a_member_has_the_same_bits_among_others_and_on_one_thread_or_two() -> None:
    few, _ = train([job(seed) for seed in range(2)])
    many, _ = train([job(seed) for seed in range(7)])
    torch.set_num_threads(2)
    threaded, _ = train([job(seed) for seed in range(7)])
    for one, other, third in zip(few, many, threaded, strict=False):
        assert all(map(torch.equal, weights(one), weights(other)))
        assert all(map(torch.equal, weights(one), weights(third)))


def test_a_neighbour_that_diverges_or_ends_changes_no_bit() -> None:
    def jobs(rate: float, length: int) -> list[carpool.Job]:
        wild = job(0, optimizer=partial(torch.optim.SGD, lr=rate), epochs=6)
        calm = partial(torch.optim.SGD, lr=0.01)
        return [wild, job(1, epochs=6, optimizer=calm), job(2, epochs=length, optimizer=calm)]

    calm, _ = train(jobs(0.01, 6))
    wild, _ = train(jobs(1e200, 2))
    assert wild[0].outcome is carpool.Outcome.DIVERGED
    assert wild[0].steps < 6
    assert all(map(torch.equal, weights(calm[1]), weights(wild[1])))


@pytest.mark.parametrize("at", [3, 40])
def test_a_label_out_of_bounds_fails_its_own_job_where_it_is_met(at: int) -> None:
    """In the first epoch, whose steps are waited for, and in one of a launch of many."""
    spoiled = Y.clone()
    order = carpool.batch_order(1, 0, len(Y))
    spoiled[int(order[at])] = 99
    jobs = [job(0), job(1, data=(X, spoiled)), job(2)]
    found, _ = train(jobs)
    traced, _ = train(jobs, compile=False)
    assert found[1].outcome is carpool.Outcome.FAILED
    assert "Target 99 is out of bounds" in str(found[1].error)
    assert_same(found, traced)


def test_a_label_out_of_bounds_later_on_fails_its_own_job() -> None:
    """Read by a job whose data is larger than one epoch of the others: met in a launch of several epochs."""
    spoiled = Y.clone()
    spoiled[70] = 99
    index = [*range(60)]
    jobs = [job(0, index=index), job(1, data=(X, spoiled), epochs=9), job(2, index=index, epochs=9)]
    found, _ = train(jobs)
    assert found[1].outcome is carpool.Outcome.FAILED
    assert_same(found, train(jobs, compile=False)[0])


def test_a_run_of_few_steps_makes_no_machine_code() -> None:
    _, events = train([job(seed, epochs=1) for seed in range(3)], compile="auto")
    assert forms(events) == {"traced"}


def test_what_has_no_loops_is_refused_by_name_where_it_must_be_machine_code() -> None:
    def sorting(prediction: Tensor, target: Tensor) -> Tensor:
        return prediction.sort(-1).values[:, 0].mean()

    with pytest.raises(FusionError, match=r"aten\.sort"):
        train([job(seed, loss=sorting) for seed in range(2)])


def test_where_no_machine_code_can_be_made_the_step_runs_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise Refused("not here")

    monkeypatch.setattr(programs, "code_of", refused)
    monkeypatch.setattr(programs, "FEWEST_LAUNCHES", 1)
    _, events = train([job(seed) for seed in range(2)], compile="auto")
    assert "resident" not in forms(events)


def test_that_machine_code_was_faster_is_remembered(trials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(seed, epochs=60) for seed in range(3)]
    monkeypatch.setattr(programs, "machine_guess_s", lambda _: 0.0)
    monkeypatch.setattr(programs, "_LEAST_OPERATOR_S", 1.0)
    reason = "as machine code, where that is faster"
    assert reason in carpool.plan(jobs, device="cpu").groups[0].reason
    events: list[Event] = []
    carpool.train(jobs, device="cpu", reporters=[events.append])
    assert forms(events) == {"resident"}
    assert reason not in carpool.plan(jobs, device="cpu").groups[0].reason

    def timed(*_: Any) -> Any:
        raise AssertionError("timed again")

    monkeypatch.setattr(programs, "shortest", timed)
    again: list[Event] = []
    carpool.train(jobs, device="cpu", reporters=[again.append])
    assert forms(again) == {"resident"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_launches_of_its_own() -> None:
    train([job(seed) for seed in range(2)])
    child = os.fork()
    if not child:
        try:
            train([job(seed) for seed in range(2)])
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
