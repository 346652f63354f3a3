"""Data that comes in batches: every kind trains as a plain loop over it would, alone and stacked, and nothing is left running."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import carpool
from carpool.data import Queue
from carpool.errors import DataError, OptimizerError
from carpool.events import BatchesRead, Event, GroupFellBack

X = torch.randn(22, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("carpool")] == []
    assert multiprocessing.active_children() == []


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[place], Y[place]


class Flow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Batches:
    """A plain iterable that can be read again."""

    def __iter__(self) -> Iterator[Any]:
        return zip(X.split(4), Y.split(4), strict=True)


def generator() -> Iterator[Any]:
    yield from Batches()


def arrays() -> Iterator[Any]:
    for x, y in Batches():
        yield x.numpy(), y.numpy()


KINDS: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=4),
    "loader of a dataset": lambda: DataLoader(Rows(), batch_size=4),
    "loader with workers": lambda: DataLoader(Rows(), batch_size=4, num_workers=2),
    "loader of an iterable": lambda: DataLoader(Flow(), batch_size=4),
    "iterable dataset": Flow,
    "iterable": Batches,
    "function": lambda: generator,
    "function of arrays": lambda: arrays,
    "queue": lambda: Queue(lambda worker: Batches(), capacity=3),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def job(data: Any, name: str = "a", **options: Any) -> carpool.Job:
    defaults = {
        "loss": F.mse_loss,
        "optimizer": partial(torch.optim.Adam, lr=0.02),
        "epochs": 3,
        "batch_size": 4,
        "shuffle": False,
    }
    return carpool.Job(options.pop("model", net), data, name=name, **{**defaults, **options})


def train(*jobs: carpool.Job, **options: Any) -> carpool.Results:
    return carpool.train(jobs, **{"device": "cpu", "reporters": [], "compile": False, **options})


def by_hand(batches: Any, seed: int = 0, epochs: int = 3, lr: float = 0.02) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(seed)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    history = []
    for epoch in range(epochs):
        total = count = 0.0
        pass_of: Any = batches(epoch) if callable(batches) else batches
        for x, y in pass_of:
            optimizer.zero_grad()
            loss = F.mse_loss(model(torch.as_tensor(x)), torch.as_tensor(y))
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(x), count + len(x)
        history.append(total / count)
    return model, history


def assert_like(result: carpool.Result, expected: tuple[nn.Module, list[float]]) -> None:
    assert result.error is None
    model, history = expected
    assert np.allclose(result.history["loss"], history, rtol=1e-10)
    for one, other in zip(result.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_alone_equals_a_plain_loop(kind: str):
    (result,) = train(job(KINDS[kind]()))
    assert result.strategy == "interleaved"
    assert_like(result, by_hand(Batches()))


@pytest.mark.parametrize("kind", KINDS)
def test_members_with_sources_of_their_own_fuse_and_equal_plain_loops(kind: str):
    jobs = [job(KINDS[kind](), f"s{seed}", seed=seed) for seed in range(3)]
    results = train(*jobs, strategy="fused")
    for seed, result in enumerate(results):
        assert_like(result, by_hand(Batches(), seed))


def test_a_shared_source_is_read_once_for_all():
    read: list[int] = []

    def source() -> Iterator[Any]:
        read.append(1)
        yield from Batches()

    jobs = [job(source, f"s{seed}", seed=seed, epochs=2) for seed in range(4)]
    results = train(*jobs, strategy="fused")
    assert len(read) == 2
    for seed, result in enumerate(results):
        assert_like(result, by_hand(Batches(), seed, epochs=2))


def test_jobs_of_different_structures_share_a_source_too():
    read: list[int] = []

    def source() -> Iterator[Any]:
        read.append(1)
        yield from Batches()

    wide = partial(nn.Linear, 3, 1, dtype=torch.float64)
    first, second = train(job(source, "deep", epochs=2), job(source, "flat", model=wide, epochs=2))
    assert len(read) == 2
    assert first.error is None
    assert second.error is None
    assert_like(first, by_hand(Batches(), epochs=2))


def test_members_of_a_shared_source_may_end_at_different_epochs():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    results = train(job(loader, "short", epochs=1), job(loader, "long", epochs=3), strategy="fused")
    assert_like(results["short"], by_hand(Batches(), epochs=1))
    assert_like(results["long"], by_hand(Batches(), epochs=3))


def test_a_dataset_is_read_in_the_public_order():
    def batches(epoch: int) -> Iterator[Any]:
        order = carpool.batch_order(7, epoch, len(X))
        for places in np.split(order, range(4, len(X), 4)):
            yield X[places], Y[places]

    (result,) = train(job(Rows(), seed=7, shuffle=True))
    assert_like(result, by_hand(batches, 7))


def test_a_dataset_may_be_read_through_an_index():
    view = [3, 1, 8, 20, 5]
    (result,) = train(job(Rows(), index=view))
    assert_like(result, by_hand([(X[view[:4]], Y[view[:4]]), (X[view[4:]], Y[view[4:]])]))


def test_a_shuffling_loader_has_one_order_whoever_draws_beside_it():
    def loaded(neighbour: bool) -> carpool.Result:
        mine = job(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True), "mine")
        noisy = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
        others = [job((X, Y), "other", model=noisy)] if neighbour else []
        torch.manual_seed(int(neighbour))
        return train(*others, mine)["mine"]

    alone, beside = loaded(False), loaded(True)
    for mine, hers in zip(alone.model.parameters(), beside.model.parameters(), strict=True):
        assert torch.equal(mine, hers)
    # A mean is summed chunk by chunk, and how long a chunk is depends on how many batches were there: one bit.
    assert alone.history["loss"] == pytest.approx(beside.history["loss"], rel=1e-14)
    assert len(set(alone.history["loss"])) == 3


def test_a_loaders_own_generator_is_left_alone():
    mine = torch.Generator().manual_seed(5)
    (result,) = train(
        job(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, generator=mine), epochs=2)
    )
    twin = DataLoader(
        TensorDataset(X, Y), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    assert_like(result, by_hand(lambda epoch: twin, epochs=2))


def test_dicts_and_several_inputs_go_through_a_step():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.one(a) + self.other(b)

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(batch["x"], batch["x"] ** 2), batch["y"])

    class Dicts(Rows):
        def __getitem__(self, place: int) -> Any:
            return {"x": X[place], "y": Y[place]}

    streamed = [
        job(DataLoader(Dicts(), batch_size=4), f"s{seed}", model=Two, loss=None, step=step, seed=seed)
        for seed in (0, 1)
    ]
    held = [job({"x": X, "y": Y}, f"s{seed}", model=Two, loss=None, step=step, seed=seed) for seed in (0, 1)]
    for one, other in zip(train(*streamed, strategy="fused"), train(*held, strategy="fused"), strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"])


def test_batches_that_hold_words_train_alone_with_the_reason():
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, words = batch
        assert all(isinstance(word, str) for word in words)
        return F.mse_loss(model(x), y)

    def batches() -> Iterator[Any]:
        for x, y in Batches():
            yield x, y, ["word"] * len(x)

    jobs = [job(batches, f"s{seed}", loss=None, step=step, seed=seed) for seed in (0, 1)]
    plan = carpool.plan(jobs, device="cpu")
    assert {group.reason for group in plan.groups} == {"cannot be stacked: its batches hold str"}
    for seed, result in enumerate(train(*jobs)):
        assert_like(result, by_hand(Batches(), seed))


def test_batches_of_changing_shapes_fall_back_and_start_again():
    def ragged() -> Iterator[Any]:
        for width in (3, 5, 2):
            x = torch.ones(4, width, 3, dtype=torch.float64)
            yield x, torch.full((4, width, 1), 2.0, dtype=torch.float64)

    events: list[Event] = []
    jobs = [job(ragged, f"s{seed}", seed=seed) for seed in (0, 1)]
    results = train(*jobs, reporters=[events.append])
    (fell,) = [event for event in events if isinstance(event, GroupFellBack)]
    assert "a batch has shapes [(4, 5, 3), (4, 5, 1)]" in fell.reason
    for seed, result in enumerate(results):
        assert_like(result, by_hand(lambda epoch: ragged(), seed))


def test_a_generator_object_is_good_for_one_epoch():
    (result,) = train(job(generator(), epochs=1))
    assert_like(result, by_hand(Batches(), epochs=1))
    again, sound = train(job(generator(), epochs=2), job((X, Y), "sound"))
    assert again.outcome is carpool.Outcome.FAILED
    assert "none in epoch 1" in str(again.error)
    assert sound.error is None


@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
def test_a_source_that_raises_fails_its_job_and_no_other(strategy: str):
    def broken() -> Iterator[Any]:
        yield from list(Batches())[:3]
        raise OSError("disk gone")

    jobs = [job(broken, "broken"), job(Batches(), "sound", seed=1)]
    results = train(*jobs, strategy=strategy)
    assert isinstance(results["broken"].error, OSError)
    assert results["broken"].steps == 3
    assert_like(results["sound"], by_hand(Batches(), 1))


def test_a_source_that_raises_before_its_first_batch_fails_its_job():
    def broken() -> Iterator[Any]:
        raise OSError("no such disk")
        yield

    results = train(job(broken, "broken"), job((X, Y), "sound"))
    assert isinstance(results["broken"].error, OSError)
    assert results["sound"].error is None


def test_validation_may_come_in_batches():
    streamed = job(Batches(), validation_data=DataLoader(Rows(), batch_size=5))
    held = job((X, Y), validation_data=(X, Y))
    one, other = train(streamed)[0], train(held)[0]
    assert one.history["val_loss"] == pytest.approx(other.history["val_loss"])
    (third,) = train(job(Batches(), validation_data=Rows()))
    assert third.history["val_loss"] == pytest.approx(other.history["val_loss"])


def test_depth_is_reported():
    events: list[Event] = []
    train(job(Queue(lambda worker: Batches(), capacity=3), epochs=2), reporters=[events.append])
    read = [event for event in events if isinstance(event, BatchesRead)]
    assert sum(event.batches for event in read) == 2 * 6
    assert {event.capacity for event in read} == {3}
    assert all(0 <= event.depth <= 3 for event in read)


def test_index_beside_a_loader_is_refused():
    with pytest.raises(DataError, match="index= beside arrays or a map-style Dataset"):
        train(job(DataLoader(Rows(), batch_size=4), index=[1, 2]))


def test_misuse_of_one_job_leaves_no_thread_of_another():
    wrong = carpool.Job(net, (X, Y), name="wrong", loss=F.mse_loss)
    with pytest.raises(OptimizerError):
        train(job(Batches()), wrong)


def test_a_plan_leaves_no_thread():
    assert carpool.plan([job(Batches())], device="cpu").groups[0].strategy == "interleaved"


def test_ctrl_c_stops_loaders_and_workers():
    import os
    import signal

    def ctrl_c(event: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    loader = DataLoader(Rows(), batch_size=4, num_workers=1)
    jobs = [
        job(loader, "a", epochs=1000, callbacks=[ctrl_c]),
        job(Batches(), "b", epochs=1000, model=partial(nn.Linear, 3, 1, dtype=torch.float64)),
    ]
    with pytest.raises(carpool.Interrupted) as caught:
        train(*jobs)
    assert {result.outcome.word for result in caught.value.results} == {"interrupted"}
    assert caught.value.results["a"].steps == 6


# What sharing must not do


def shuffled_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)


def other(**options: Any) -> carpool.Job:
    return job(
        options.pop("data"),
        options.pop("name"),
        model=partial(nn.Linear, 3, 1, dtype=torch.float64),
        **options,
    )


def assert_same(one: carpool.Result, two: carpool.Result) -> None:
    assert one.error is None
    assert two.error is None
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_groups_that_share_sources_crosswise_do_not_wait_for_each_other():
    one, two = DataLoader(TensorDataset(X, Y), batch_size=4), shuffled_loader()
    results = train(
        job(one, "a", epochs=1),
        job(two, "b", epochs=6),
        other(data=one, name="c", epochs=6),
        other(data=two, name="d", epochs=1),
        job(one, "e", epochs=1, seed=1),
        other(data=one, name="f", epochs=6, seed=1),
    )
    assert {result.outcome.word for result in results} == {"completed"}


@pytest.mark.slow
def test_a_session_that_cannot_be_opened_holds_up_nobody():
    class Heavy(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of memory")

    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    heavy = partial(Heavy, 3, 1, dtype=torch.float64)
    results = train(job(loader, "heavy", model=heavy), job(loader, "sound"))
    assert results["heavy"].outcome.word == "out_of_memory"
    assert "RuntimeError: out of memory, with" in str(results["heavy"].error)
    assert_like(results["sound"], by_hand(Batches()))


def test_a_step_that_writes_into_its_batch_changes_no_neighbours():
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.sub_(0.5))

    def run(strategy: str) -> carpool.Results:
        loader = DataLoader(TensorDataset(X, Y), batch_size=4)
        held = X.clone()
        results = train(
            job(loader, "shifts", model=Shifting, validation_data=(held, Y)),
            other(data=loader, name="plain", validation_data=(held, Y)),
            strategy=strategy,
        )
        assert torch.equal(held, X)
        return results

    for one, two in zip(run("interleaved"), run("in_turn"), strict=True):
        assert_same(one, two)
        assert one.history["val_loss"] == pytest.approx(two.history["val_loss"])


def test_a_group_that_falls_back_before_its_first_step_has_lost_no_batch(monkeypatch: pytest.MonkeyPatch):
    from carpool.adapters.torch.fused import StackedSession
    from carpool.planning.trials import Trial

    monkeypatch.setattr(StackedSession, "trial", lambda session, chunk: Trial(2, 1.0, 0.1))
    once = iter(list(Batches()))
    results = train(job(once, "a", epochs=1), job(once, "b", epochs=1, seed=1))
    assert [result.steps for result in results] == [6, 6]
    assert_like(results["b"], by_hand(Batches(), 1, epochs=1))


def test_one_shuffling_loader_in_a_group_and_beside_it_has_one_order(monkeypatch: pytest.MonkeyPatch):
    from carpool.adapters.torch.fused import StackedSession
    from carpool.planning.trials import Trial

    def run(strategy: str) -> carpool.Results:
        loader = shuffled_loader()
        made = [other(data=loader, name="c", epochs=6), job(loader, "a"), job(loader, "b", seed=1)]
        return train(*made, strategy=strategy)

    expected = run("in_turn")
    monkeypatch.setattr(StackedSession, "trial", lambda session, chunk: Trial(2, 1.0, 0.1))
    for one, two in zip(run("auto"), expected, strict=True):
        assert_same(one, two)


def test_phases_take_streams_of_any_shape():
    phase = carpool.Phase(lambda model, batch: model(batch).square().mean(), partial(torch.optim.SGD, lr=0.1))
    held = carpool.Job(net, X, name="g", phases=[phase], batch_size=4, shuffle=False)
    streamed = carpool.Job(net, DataLoader(X, 4), name="g", phases=[phase])  # type: ignore[arg-type]
    assert_same(train(held)[0], train(streamed)[0])


def test_what_comes_between_two_rows_is_for_neither_of_them(monkeypatch: pytest.MonkeyPatch):
    from carpool.adapters.torch.window import Window
    from carpool.data import Tap

    asked: list[Tap] = []
    answers = Tap.ready
    monkeypatch.setattr(Tap, "ready", lambda tap: asked.append(tap) or answers(tap))
    found: list[int] = []
    supply = Window.supply

    def watched(window: Window, members: Any) -> Any:
        before = len(asked)
        made = supply(window, members)
        found.append(len(asked) - before)
        return made

    monkeypatch.setattr(Window, "supply", watched)
    source = Batches()
    results = train(*(job(source, f"s{seed}", seed=seed) for seed in range(5)), strategy="fused")
    assert set(found) == {1}
    assert {result.steps for result in results} == {18}


@pytest.mark.slow
def test_workers_that_stay_read_in_one_order_whether_or_not_they_were_used_before():
    def loader() -> DataLoader[Any]:
        data = TensorDataset(X, Y)
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    one = loader()
    first, again = train(job(one, "a"))[0], train(job(one, "a"))[0]
    fresh = train(job(loader(), "a"))[0]
    assert_same(first, again)
    assert_same(first, fresh)
    del one  # workers that stay are the loader's own: they go with it
    gc.collect()
