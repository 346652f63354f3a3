"""A stack of tiny models runs on one thread, a large one on all: chosen by what its operations compute, and said."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import carpool
from carpool.adapters.torch.threads import Threads, worth_sharing
from carpool.events import GroupCompiled


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def jobs(width: int, batch: int, count: int = 2, loss: Any = F.mse_loss) -> list[carpool.Job]:
    x, y = torch.randn(batch, width), torch.randn(batch, width)
    model = partial(nn.Linear, width, width)
    adam = partial(torch.optim.Adam, lr=1e-3)
    return [
        carpool.Job(model, (x, y), loss=loss, optimizer=adam, batch_size=batch, seed=seed)
        for seed in range(count)
    ]


def threads_of(made: list[carpool.Job], **options: Any) -> tuple[set[int], str]:
    """The threads with which a stack's step was prepared, and why its first job ran as it did."""
    found: set[int] = set()

    def note(event: object) -> None:
        if isinstance(event, GroupCompiled):
            found.add(torch.get_num_threads())

    results = carpool.train(made, device="cpu", compile=False, reporters=[note], **options)
    assert all(result.outcome is carpool.Outcome.COMPLETED for result in results)
    return found, results[0].reason


@pytest.mark.usefixtures("two_threads")
def test_a_tiny_stack_runs_on_one_thread_and_says_so():
    found, reason = threads_of(jobs(4, 8))
    assert found == {1}
    assert reason.endswith("on one of 2 threads, as its operations are too small to be shared out")
    assert torch.get_num_threads() == 2, "the user's own setting is as it was"


@pytest.mark.usefixtures("two_threads")
def test_a_large_stack_keeps_all_threads():
    found, reason = threads_of(jobs(512, 1024))
    assert found == {2}
    assert "thread" not in reason


@pytest.mark.usefixtures("two_threads")
def test_a_job_alone_keeps_all_threads():
    seen: list[int] = []

    def loss(prediction: Any, target: Any) -> Any:
        seen.append(torch.get_num_threads())
        return F.mse_loss(prediction, target)

    threads_of(jobs(4, 8, count=1, loss=loss))
    assert set(seen) == {2}


def test_where_there_is_one_thread_nothing_is_chosen():
    found, reason = threads_of(jobs(4, 8))
    assert found == {1}
    assert "thread" not in reason


@pytest.mark.usefixtures("two_threads")
def test_what_a_step_alone_takes_is_measured_with_the_threads_that_it_would_have():
    threads = Threads(1)
    with threads.inside():
        assert torch.get_num_threads() == 1
        assert threads.outside(torch.get_num_threads) == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_sharing_must_be_clearly_faster():
    assert worth_sharing([1000.0], 2)
    assert not worth_sharing([60.0] * 100, 2), "ten of sixty microseconds are no gain to speak of"
    assert not worth_sharing([1000.0, *[30.0] * 200], 2), "one large operation among many small ones"
