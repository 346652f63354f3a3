"""A run that nobody listens to keeps its metrics in columns; what it says at the end is what it would have said on the way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import carpool
from carpool.events import EpochEnded, GroupAdvanced
from carpool.executors.driver import Driver

X, Y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(40, 1)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def jobs(**options: Any) -> list[carpool.Job]:
    """Courses of three lengths, one job with fewer epochs, and one that diverges."""
    rates, lengths, epochs = (0.01, 0.02, 1e30, 0.05), (40, 40, 40, 23), (4, 4, 4, 2)
    return [
        carpool.Job(
            net,
            (X[:length], Y[:length]),
            name=str(i),
            seed=i,
            loss=F.mse_loss,
            metrics={"worst": lambda prediction, target: (prediction - target).abs().max()},
            optimizer=partial(torch.optim.SGD, lr=rate),
            batch_size=8,
            epochs=count,
            **options,
        )
        for i, (rate, length, count) in enumerate(zip(rates, lengths, epochs, strict=True))
    ]


def told(results: Any) -> list[Any]:
    return [(result.outcome, result.steps, repr(result.history)) for result in results]


def test_nobody_listens_and_nothing_changes():
    events: list[object] = []
    heard = carpool.train(jobs(), strategy="fused", reporters=[events.append])
    unheard = carpool.train(jobs(), strategy="fused", reporters=[])
    assert events
    assert [result.outcome.word for result in heard] == ["completed", "completed", "diverged", "completed"]
    assert told(heard) == told(unheard)


class Chunks:
    """Hears nothing but chunks."""

    hears = frozenset({GroupAdvanced})

    def __init__(self) -> None:
        self.events: list[object] = []

    def __call__(self, event: object) -> None:
        self.events.append(event)


def test_a_listener_hears_what_it_names_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    ended: list[object] = []
    real = Driver._end_epoch
    monkeypatch.setattr(
        Driver, "_end_epoch", lambda self, row, metrics: ended.append(row) or real(self, row, metrics)
    )
    chunks = Chunks()
    partly = carpool.train(jobs(), strategy="fused", reporters=[chunks])
    assert {type(event) for event in chunks.events} == {GroupAdvanced}
    booked_alone, ended[:] = len(ended), []
    everything: list[object] = []
    heard = carpool.train(jobs(), strategy="fused", reporters=[Chunks(), everything.append])
    assert booked_alone < len(ended)  # what nobody hears is not put into words
    assert sum(isinstance(event, EpochEnded) for event in everything) == len(ended)
    assert told(partly) == told(heard)


def test_interrupted_with_nobody_listening_the_history_is_there():
    seen = []

    def stop(event: Any) -> None:
        seen.append(event)
        if len(seen) == 2:
            raise KeyboardInterrupt

    asked = jobs()
    asked.append(
        carpool.Job(
            net,
            (X, Y),
            loss=F.mse_loss,
            optimizer=partial(torch.optim.Adam, lr=0.01),
            batch_size=8,
            epochs=4,
            name="watched",
            callbacks=[stop],
        )
    )
    with pytest.raises(carpool.Interrupted) as raised:
        carpool.train(asked, reporters=[])
    results = raised.value.results
    assert all(len(result.history.get("loss", ())) <= 4 for result in results)
    assert any(result.history for result in results if result.name != "watched")
