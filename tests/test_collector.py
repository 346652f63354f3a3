"""The collector of cyclic garbage rests while much is made, and comes back to it in the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

import carpool
from carpool import collector
from carpool.events import Event, RunStarted


class Ring:
    """Refers to itself: only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    assert gc.isenabled()
    gc.unfreeze()


def dropped() -> weakref.ref[Ring]:
    return weakref.ref(Ring())


def dropped_into_ice() -> weakref.ref[Ring]:
    ring = Ring()
    gc.freeze()
    return weakref.ref(ring)


def test_put_off_it_looks_for_nothing():
    with collector.put_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0, "only a run sets anything aside"


def test_whoever_switched_it_off_finds_it_off():
    gc.disable()
    try:
        with collector.put_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_run_sets_aside_what_was_made_and_gives_it_back():
    with collector.set_aside(1000):
        with collector.put_off():
            ring = dropped()
        gc.collect()
        assert ring() is not None, "set aside"
    gc.collect()
    assert ring() is None


def test_garbage_from_before_is_not_set_aside():
    ring = dropped()
    with collector.set_aside(1000), collector.put_off():
        assert ring() is None


def test_a_run_of_few_models_sets_nothing_aside():
    with collector.set_aside(8):
        with collector.put_off():
            pass
        assert gc.get_freeze_count() == 0


def test_the_last_of_two_runs_gives_it_back():
    with collector.set_aside(1000):
        with collector.set_aside(1000), collector.put_off():
            pass
        assert gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_where_memory_is_short_it_is_looked_through_after_all():
    with collector.set_aside(1000):
        with collector.put_off():
            ring = dropped()
        collector.collect()
        assert ring() is None


def test_what_others_froze_stays_frozen():
    theirs = dropped_into_ice()
    with collector.set_aside(1000), collector.put_off():
        pass
    gc.collect()
    assert theirs() is not None
    gc.unfreeze()
    gc.collect()
    assert theirs() is None


def test_training_many_sets_them_aside_and_few_not():
    x, y = torch.randn(8, 2), torch.randn(8, 1)

    def frozen(count: int) -> int:
        counts: list[int] = []

        def look(event: Event) -> None:
            if isinstance(event, RunStarted):  # counting them looks at each
                counts.append(gc.get_freeze_count())

        jobs = [
            carpool.Job(
                torch.nn.Linear(2, 1), (x, y), loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD
            )
            for _ in range(count)
        ]
        carpool.train(jobs, device="cpu", reporters=[look])
        assert gc.get_freeze_count() == 0
        return counts[0]

    assert frozen(2) == 0
    assert frozen(256) > 0


def test_models_go_with_their_results_and_wait_for_no_collector():
    x, y = torch.randn(8, 2), torch.randn(8, 1)

    def trained() -> carpool.Results:
        jobs = [
            carpool.Job(
                lambda: torch.nn.Linear(2, 1),
                (x, y),
                seed=seed,
                loss=torch.nn.functional.mse_loss,
                optimizer=torch.optim.SGD,
            )
            for seed in range(2)
        ]
        return carpool.train(jobs, device="cpu", reporters=[], compile=False)

    trained()  # what torch's tracer leaves behind is its own
    gc.collect()
    gc.disable()
    try:
        results = trained()
        models = [weakref.ref(result.model) for result in results]
        assert all(model() is not None for model in models)
        del results
        assert all(model() is None for model in models)
    finally:
        gc.enable()


class Own(torch.nn.Linear):
    """A model that holds itself."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.call = self.forward


def test_models_that_hold_themselves_are_found_before_they_are_thousands():
    alive: weakref.WeakSet[Own] = weakref.WeakSet()
    for _ in range(5):
        with collector.set_aside(1000):
            with collector.put_off():
                made = [Own() for _ in range(1000)]
                alive.update(made)
            del made
        assert len(alive) <= 3000


def test_models_that_are_gone_are_not_looked_for(monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    collected = gc.collect
    collected()

    def collect(generation: int = 2) -> int:
        looked.append(generation)
        return collected(generation)

    monkeypatch.setattr(gc, "collect", collect)
    for _ in range(6):
        with collector.set_aside(1000) as told, collector.put_off():
            models = [(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)) for _ in range(1000)]
            told(models)
        del models
    assert looked[1:] == [1] * 5, "what was set aside before this test may have been due"


@pytest.mark.parametrize("kind", [Own, Ring, dict])
def test_models_that_are_not_gone_are_looked_for(kind: type, monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: looked.append(generation))
    for _ in range(6):
        with collector.set_aside(1000) as told, collector.put_off():
            told((torch.nn.Linear(1, 1), kind()) for _ in range(1000))
    assert looked.count(2) >= 2
