"""A run that nobody listens to keeps its metrics in columns; what it says at the end is what it would have said on the way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import carpool
from carpool.adapters.torch.fused import StackedSession
from carpool.events import EpochEnded, EpochsEnded, GroupAdvanced
from carpool.executors.driver import Driver
from carpool.reporters.console import Console

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


@pytest.mark.parametrize("options", [{}, {"validation_data": (X[:13], Y[:13])}], ids=["", "validated"])
def test_nobody_listens_and_nothing_changes(options: dict[str, Any]):
    events: list[object] = []
    heard = carpool.train(jobs(**options), strategy="fused", reporters=[events.append])
    unheard = carpool.train(jobs(**options), strategy="fused", reporters=[])
    assert events
    assert [result.outcome.word for result in heard] == ["completed", "completed", "diverged", "completed"]
    assert told(heard) == told(unheard)


def test_validation_is_enqueued_with_the_steps_before_it_and_nobody_waits(monkeypatch: pytest.MonkeyPatch):
    waited: list[object] = []
    real = StackedSession.evaluate
    monkeypatch.setattr(
        StackedSession, "evaluate", lambda self, rows: waited.append(rows) or real(self, rows)
    )
    several = [replace(job, epochs=6) for job in jobs(validation_data=(X[:13], Y[:13]))]
    together = carpool.train(several, strategy="fused", reporters=[])
    assert 0 < len(waited) <= 2  # the last epochs of each length
    alone = carpool.train(several, strategy="in_turn", reporters=[])
    for one, other in zip(together, alone, strict=True):
        assert one.history.keys() == other.history.keys()
        for name, values in one.history.items():
            assert values == pytest.approx(list(other.history[name]), rel=1e-4, nan_ok=True), (one.name, name)


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


class Epochs(Chunks):
    """Hears of epochs, together where that can be."""

    hears = frozenset({EpochEnded, EpochsEnded})

    def history(self) -> dict[str, dict[str, list[float]]]:
        """What was told, by job; an epoch that is told twice or left out shows."""
        found: dict[str, dict[str, list[float]]] = {}
        for event in self.events:
            rows = [(event.name, event.epoch, event.metrics)] if isinstance(event, EpochEnded) else []
            if isinstance(event, EpochsEnded):
                rows = [
                    (name, epoch, {metric: column[place] for metric, column in event.metrics.items()})
                    for place, (name, epoch) in enumerate(zip(event.names, event.epochs, strict=True))
                ]
            for name, epoch, metrics in rows:
                for metric, value in metrics.items():
                    values = found.setdefault(name, {}).setdefault(metric, [])
                    assert len(values) == epoch, (name, epoch)
                    values.append(float(value))
        return found


@pytest.mark.parametrize("validation", [None, (X[:13], Y[:13])], ids=["", "validated"])
@pytest.mark.parametrize("length", [(40, 40, 40, 40), (40, 40, 40, 23), (40, 31, 40, 23)])
def test_epochs_that_end_together_are_told_together_and_once(length: tuple[int, ...], validation: Any):
    several = [
        replace(job, data=(X[:size], Y[:size]), optimizer=partial(torch.optim.SGD, lr=0.01), epochs=5)
        for job, size in zip(jobs(validation_data=validation), length, strict=True)
    ]
    epochs = Epochs()
    results = carpool.train(several, strategy="fused", reporters=[epochs])
    assert any(isinstance(event, EpochsEnded) and len(event.names) > 1 for event in epochs.events)
    assert epochs.history() == {
        result.name: {name: list(values) for name, values in result.history.items()} for result in results
    }


def test_beside_one_who_hears_of_each_epoch_nothing_is_told_together():
    epochs, each = Epochs(), list[object]()
    carpool.train(jobs(), strategy="fused", reporters=[epochs, each.append])
    assert {type(event) for event in epochs.events} == {EpochEnded}
    assert not any(isinstance(event, EpochsEnded) for event in each)


def test_the_console_hears_of_epochs_together(monkeypatch: pytest.MonkeyPatch):
    heard: list[object] = []
    real = Console.__call__
    monkeypatch.setattr(Console, "__call__", lambda self, event: (heard.append(event), real(self, event)))
    console = Console()
    results = carpool.train(jobs(), strategy="fused", reporters=[console])
    assert any(isinstance(event, EpochsEnded) for event in heard)
    console._tally.settle()
    shown = {job.name: (job.ended_epochs, job.metrics) for job in console._tally.jobs.values()}
    for result in results:
        last = {name: values[-1] for name, values in result.history.items()}
        assert shown[result.name] == (len(result.history.get("loss", ())), last)
