"""`accumulate=n`: an update every n batches and at an epoch's last, held against a loop written by hand."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset
from zoo import batch_norm, mlp, tables

import carpool
from carpool.adapters.torch.cadence import updates_at
from carpool.errors import JobError
from carpool.kernels.updates import UPDATES
from carpool.kernels.updates.sgd import Sgd
from carpool.result import Outcome
from carpool.testing.conformance import DOUBLE

X, Y = tables(True)["vector"]
Optimize = Callable[..., torch.optim.Optimizer]
COSINE = partial(schedules.CosineAnnealingLR, T_max=9)
BY_STEP = carpool.Schedule(COSINE, every="step")


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    return kind().double()


def job(seed: int, n: int, kind=mlp, optimizer: Optimize = torch.optim.AdamW, **changes) -> carpool.Job:
    settings = {"batch_size": 8, "epochs": 3 + seed, "accumulate": n, "seed": seed, "name": f"m{seed}"}
    lr = 1e-2 / (1 + seed)
    return carpool.Job(
        partial(make, kind),
        changes.pop("data", (X, Y)),
        loss=F.cross_entropy,
        optimizer=partial(optimizer, lr=lr),
        **settings | changes,
    )


def train(jobs: list[carpool.Job], strategy: str) -> carpool.Results:
    return carpool.train(jobs, strategy=strategy, device="cpu", compile=False, reporters=[])


def by_hand(job: carpool.Job) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    scheduler: Any = COSINE(optimizer) if job.scheduler else None
    history = []
    view = np.arange(len(X)) if job.index is None else np.asarray(job.index)
    for epoch in range(job.epochs):
        batches = torch.from_numpy(view[carpool.batch_order(job.seed, epoch, len(view))]).split(
            job.batch_size
        )
        total = 0.0
        for number, rows in enumerate(batches, start=1):
            loss = F.cross_entropy(model(X[rows]), Y[rows])
            total += loss.item() * len(rows)
            (loss / job.accumulate).backward()
            if number % job.accumulate and number < len(batches):
                continue
            if job.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None and isinstance(job.scheduler, carpool.Schedule):
                scheduler.step()
        if scheduler is not None and not isinstance(job.scheduler, carpool.Schedule):
            scheduler.step()
        history.append(total / len(view))
    return model, optimizer, history


CASES = {
    "plain": {},
    "sgd": {"optimizer": partial(torch.optim.SGD, momentum=0.9, dampening=0.2)},
    "clipped": {"clip_norm": 0.05},
    "by step": {"scheduler": BY_STEP},
    "by epoch": {"scheduler": COSINE, "clip_norm": 0.1},
    "batch norm": {"kind": batch_norm, "scheduler": BY_STEP},
}


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
@pytest.mark.parametrize("n", [1, 3, 100])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_by_hand(case: str, n: int, strategy: str):
    lengths = (60, 47, 23)  # each with a tail of its own
    jobs = [job(seed, n, index=np.arange(length), **CASES[case]) for seed, length in enumerate(lengths)]
    for one, result in zip(jobs, train(jobs, strategy), strict=True):
        assert result.strategy == strategy
        model, optimizer, history = by_hand(one)
        theirs = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, leaf in result.model.state_dict(keep_vars=True).items():
            torch.testing.assert_close(leaf, theirs[name], rtol=0, atol=DOUBLE)
        assert result.history["loss"] == pytest.approx(history, abs=DOUBLE)
        assert result.optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
        for mine, hers in zip(result.optimizer.state.values(), optimizer.state.values(), strict=True):
            for slot, value in hers.items():
                torch.testing.assert_close(mine[slot], value, rtol=0, atol=DOUBLE)


def flowing() -> Iterator[Any]:
    """Batches without a length: that one is an epoch's last shows only when it is there."""
    yield from zip(X[:47].split(8), Y[:47].split(8), strict=True)


STREAMS: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(TensorDataset(X[:47], Y[:47]), batch_size=8),
    "function": lambda: flowing,
}


def streamed_by_hand(job: carpool.Job) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    history = []
    for _ in range(job.epochs):
        total, batches = 0.0, list(flowing())
        for number, (x, y) in enumerate(batches, start=1):
            loss = F.cross_entropy(model(x), y)
            total += loss.item() * len(x)
            (loss / job.accumulate).backward()
            if number % job.accumulate == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
        history.append(total / 47)
    return model, optimizer, history


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
@pytest.mark.parametrize("kind", STREAMS)
def test_streamed_batches_equal_a_loop_by_hand(kind: str, strategy: str):
    jobs = [job(seed, 4, data=STREAMS[kind](), shuffle=False) for seed in range(3)]
    for one, result in zip(jobs, train(jobs, strategy), strict=True):
        assert (result.error, result.strategy) == (None, strategy)
        model, optimizer, history = streamed_by_hand(one)
        assert_close(result.model, model, DOUBLE)
        assert result.history["loss"] == pytest.approx(history, abs=DOUBLE)
        steps = [{int(state["step"]) for state in o.state.values()} for o in (result.optimizer, optimizer)]
        assert steps[0] == steps[1] == {2 * one.epochs}


class TooFar(Sgd):
    def apply(self, weight, grad, slots, columns, options):
        return super().apply(weight, grad * 1.5, slots, columns, options)


def test_the_check_looks_at_the_update_although_the_first_batch_only_gathers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(UPDATES, torch.optim.SGD, TooFar())
    results = train([job(seed, 3, optimizer=torch.optim.SGD) for seed in range(2)], "auto")
    assert "differs from its step alone" in results[0].reason


def test_verifying_a_group_of_uneven_epochs_raises_no_false_alarm():
    """One row's epoch begins while another has half of an update's gradients."""
    lengths = (len(X), len(X) - 16, len(X))
    jobs = [job(i, 2, index=np.arange(n), epochs=3) for i, n in enumerate(lengths)]
    results = carpool.train(jobs, strategy="fused", verify=True, device="cpu", compile=False, reporters=[])
    assert {result.outcome for result in results} == {Outcome.COMPLETED}


def assert_close(one: nn.Module, other: nn.Module, atol: float) -> None:
    for mine, hers in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, hers, rtol=0, atol=atol)


@pytest.mark.parametrize("scheduler", [None, BY_STEP])
def test_a_row_that_diverges_while_gathering_leaves_its_neighbours_bits(scheduler: Any):
    holed = X.clone()
    holed[carpool.batch_order(1, 0, len(X))[33]] = torch.nan  # in the first epoch's fifth batch

    def one(seed: int, x: torch.Tensor) -> carpool.Job:
        return job(seed, 3, kind=batch_norm, scheduler=scheduler, data=(x, Y), epochs=3)

    sound = train([one(0, X), one(1, X), one(2, X)], "fused")
    broken = train([one(0, X), one(1, holed), one(2, X)], "fused")
    (single,) = train([one(1, holed)], "in_turn")
    assert broken[1].outcome is single.outcome is Outcome.DIVERGED
    assert broken[1].steps == single.steps == 4
    assert_close(broken[1].model, single.model, DOUBLE)
    assert broken[1].optimizer.param_groups[0]["lr"] == single.optimizer.param_groups[0]["lr"]
    for result in (broken[1], single):
        assert {int(state["step"]) for state in result.optimizer.state.values()} == {1}
    for row in (0, 2):
        assert_close(sound[row].model, broken[row].model, 0)


def test_jobs_that_accumulate_differently_are_different_structures():
    plan = carpool.plan([job(0, 2), job(1, 2), job(2, 3)], device="cpu")
    assert "'accumulate=' is 3, expected 2" in plan.groups[1].reason


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_a_wrong_number_is_refused(n: Any):
    with pytest.raises(JobError, match="Expected accumulate of at least 1"):
        job(0, n)


def test_an_update_falls_on_every_nth_batch_and_on_the_last():
    assert [updates_at(batch, batch == 3, 3) for batch in range(4)] == [False, False, True, True]
