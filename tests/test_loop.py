"""Loops of one's own: a step at a time beside everything else, with random numbers of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import carpool
from carpool import Loop
from carpool.errors import JobError, StepError
from carpool.events import EpochEnded, Event

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def train(*jobs: carpool.Job, **options: Any) -> carpool.Results:
    return carpool.train(jobs, **{"device": "cpu", "reporters": [], "compile": False, **options})


def fit(lr: float, steps: int) -> Iterator[dict[str, Any]]:
    """A loop as people write it: own model, own batches, dropout, three kinds of random numbers."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        rows = np.random.permutation(len(X))[: random.choice([8, 16])]
        loss = F.mse_loss(model(X[rows]), Y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield {"loss": loss}
    return model


def alone(lr: float, steps: int, seed: int) -> nn.Module:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    steps_of = fit(lr, steps)
    while True:
        try:
            next(steps_of)
        except StopIteration as end:
            return end.value


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_each_ends_where_it_would_have_ended_alone_to_the_bit():
    expected = [alone(0.05, 30, seed) for seed in range(3)]
    loops = [Loop(fit, 0.05, 30, seed=seed, name=f"loop {seed}") for seed in range(3)]
    job = carpool.Job(
        partial(nn.Linear, 3, 1),
        (X, Y),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        epochs=9,
        name="job",
    )
    before = (random.getstate(), torch.get_rng_state())
    results = train(*loops, job)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    for seed, model in enumerate(expected):
        assert same(results[f"loop {seed}"].model, model)
        assert results[f"loop {seed}"].steps == 30
    assert results["job"].outcome is carpool.Outcome.COMPLETED


def test_loops_take_turns(monkeypatch: pytest.MonkeyPatch):
    from carpool.adapters.loop import train as module

    monkeypatch.setattr(module, "_SLICE_S", 0.0)
    order: list[str] = []

    def steps(name: str) -> Iterator[dict[str, float]]:
        for _ in range(20):
            order.append(name)
            yield {"loss": 1.0}

    train(Loop(steps, "a"), Loop(steps, "b"))
    assert sorted(order[:10]) != ["a"] * 10
    assert (order.count("a"), order.count("b")) == (20, 20)


@pytest.mark.parametrize(("steps", "rows"), [(0, ()), (1, (0.0,)), (4, (0.5, 2.5)), (5, (0.5, 2.5, 4.0))])
def test_every_so_many_steps_are_a_row_of_the_history(steps: int, rows: tuple[float, ...]):
    def count() -> Iterator[dict[str, float]]:
        for i in range(steps):
            yield {"loss": float(i)}

    events: list[Event] = []
    (result,) = train(Loop(count, every=2, name="a"), reporters=[events.append])
    assert result.history.get("loss", ()) == rows
    assert (result.outcome, result.steps) == (carpool.Outcome.COMPLETED, steps)
    assert [e.epoch for e in events if isinstance(e, EpochEnded)] == list(range(len(rows)))


def test_a_loop_that_raises_fails_alone():
    def broken() -> Iterator[dict[str, float]]:
        yield {"loss": 1.0}
        raise OSError("mine")

    def sound() -> Iterator[dict[str, float]]:
        yield {"loss": 1.0}

    results = train(Loop(broken, name="broken"), Loop(sound, name="sound"))
    assert isinstance(results["broken"].error, OSError)
    assert results["broken"].steps == 1
    assert results["sound"].error is None


def test_what_is_yielded_must_be_a_dict_of_numbers():
    def wrong() -> Iterator[Any]:
        yield 1.0

    with pytest.raises(StepError, match=r'Loop \'job-0\': Expected each step to `yield \{"loss": \.\.\.\}`'):
        train(Loop(wrong))


def test_a_plain_function_is_refused():
    with pytest.raises(JobError, match="Expected a generator function"):
        Loop(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="every of at least 1"):
        Loop(fit, 0.1, 1, every=0)


def test_a_loop_is_closed_when_the_run_is_interrupted():
    closed: list[bool] = []

    def endless() -> Iterator[dict[str, float]]:
        try:
            while True:
                yield {"loss": 1.0}
        finally:
            closed.append(True)

    def stop(event: Any) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(carpool.Interrupted) as caught:
        train(Loop(endless, every=10, callbacks=[stop], name="a"))
    assert closed == [True]
    assert caught.value.results["a"].outcome is carpool.Outcome.INTERRUPTED
    assert caught.value.results["a"].steps >= 10


def test_a_grid_of_loops():
    loops = carpool.grid(lambda lr, seed: Loop(fit, lr, 3, seed=seed), lr=[0.1, 0.2], seed=range(2))
    results = train(*loops)
    assert results["lr=0.2,seed=1"].config == {"lr": 0.2, "seed": 1}
    assert all(result.strategy == "interleaved" for result in results)


def test_results_of_loops_are_saved_with_the_weights_of_what_is_a_model(tmp_path: Any):
    def words() -> Iterator[dict[str, float]]:
        yield {"loss": 1.0}
        return "no model"

    results = train(Loop(fit, 0.1, 2, name="model"), Loop(words, name="words"))
    results.save(tmp_path)
    assert [path.name for path in (tmp_path / "save-1" / "weights").iterdir()] == ["model.safetensors"]


def test_values_are_read_when_they_are_yielded():
    def reused() -> Iterator[dict[str, Any]]:
        value = torch.zeros(())
        for i in range(4):
            yield {"loss": value.fill_(float(i))}

    assert train(Loop(reused, every=2))[0].history == {"loss": (0.5, 2.5)}


def test_whatever_a_loop_does_its_neighbours_end():
    def wordy() -> Iterator[dict[str, Any]]:
        yield {"loss": None}

    def untidy() -> Iterator[Any]:
        try:
            yield 3
        finally:
            raise ValueError("cleaning up")

    def sound() -> Iterator[dict[str, float]]:
        yield {"loss": 1.0}

    with pytest.warns(UserWarning, match="closing 'untidy' raised ValueError: cleaning up"):
        results = train(
            Loop(wordy, name="wordy"),
            Loop(untidy, name="untidy"),
            Loop(sound, name="far", seed=2**64 + 1),
            Loop(sound, name="sound"),
        )
    outcomes = {result.name: result.outcome.word for result in results}
    assert outcomes == {"wordy": "failed", "untidy": "failed", "far": "completed", "sound": "completed"}
    assert "Expected 'loss' to be a number" in str(results["wordy"].error)
