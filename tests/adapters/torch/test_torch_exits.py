"""Whatever a job's own code raises is that job's failure: also what ends a process, a task or a generator."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool.errors import Interrupted, StepError
from carpool.events import EpochEnded
from carpool.result import Outcome

X, Y = torch.randn(16, 4), torch.randn(16, 1)
Raise = Callable[[], None]


class Odd(BaseException):
    """Someone's own."""


KINDS = [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), Odd("odd")]


class Raising(nn.Module):
    def __init__(self, go: Raise) -> None:
        super().__init__()
        self.inner, self.go = nn.Linear(4, 1), go

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.go()
        return self.inner(x)


def job(name: str, **changes: Any) -> carpool.Job:
    settings: dict[str, Any] = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    settings |= {"data": (X, Y), "batch_size": 8, "epochs": 2, "name": name} | changes
    return carpool.Job(settings.pop("model", lambda: nn.Linear(4, 1)), settings.pop("data"), **settings)


def in_callback(go: Raise) -> carpool.Job:
    return job("bad", callbacks=[lambda event: go()])


def in_factory(go: Raise) -> carpool.Job:
    return job("bad", model=lambda: go() or nn.Linear(4, 1))


def in_optimizer(go: Raise) -> carpool.Job:
    return job("bad", optimizer=lambda p: go() or torch.optim.SGD(p, lr=0.1))


def in_loss(go: Raise) -> carpool.Job:
    return job("bad", loss=lambda p, y: go() or F.mse_loss(p, y))


def in_forward(go: Raise) -> carpool.Job:
    return job("bad", model=lambda: Raising(go))


def in_metric(go: Raise) -> carpool.Job:
    return job("bad", metrics={"m": lambda p, y: go() or p.mean()}, validation_data=(X, Y))


def in_data(go: Raise) -> carpool.Job:
    return job("bad", data=lambda: go() or (X, Y))


def in_source(go: Raise) -> carpool.Job:
    def batches() -> Iterator[Any]:
        yield X[:8], Y[:8]
        go()

    return job("bad", data=batches)


def in_scheduler(go: Raise) -> carpool.Job:
    class Broken(torch.optim.lr_scheduler.ConstantLR):
        def get_lr(self) -> Any:
            if self.last_epoch > 0:
                go()
            return super().get_lr()

    return job("bad", scheduler=Broken)


def in_loop(go: Raise) -> carpool.Job:
    def steps() -> Iterator[dict[str, float]]:
        yield {"loss": 1.0}
        go()

    return carpool.Loop(steps, name="bad")


PLACES = [
    in_callback, in_factory, in_optimizer, in_loss, in_forward, in_metric, in_data, in_source, in_scheduler, in_loop
]  # fmt: skip


def raising(error: BaseException) -> Raise:
    def go() -> None:
        raise error

    return go


def train(jobs: list[carpool.Job], **options: Any) -> carpool.Results:
    return carpool.train(jobs, device="cpu", compile=False, reporters=[], **options)


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_ends_a_process_ends_its_job_alone(place: Callable[[Raise], carpool.Job], error: BaseException):
    results = train([job("a"), place(raising(error)), job("b")])
    assert [result.outcome for result in results] == [Outcome.COMPLETED, Outcome.FAILED, Outcome.COMPLETED]
    assert results["bad"].error is error
    assert len(results["a"].history["loss"]) == 2


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "in_turn"])
def test_in_a_group_the_others_go_on(strategy: str):
    bad = job("bad", callbacks=[lambda event: sys.exit(3)])
    results = train([job("a"), bad, job("b")], strategy=strategy)
    assert [result.outcome.word for result in results] == ["completed", "failed", "completed"]
    assert len(results["bad"].history["loss"]) == 1


def test_a_run_of_which_nothing_is_left_raises_what_does_not_end_the_process():
    with pytest.raises(StepError, match="exit code 0") as caught:
        train([in_callback(lambda: sys.exit())])
    assert isinstance(caught.value.__cause__, SystemExit)


def test_who_asks_for_the_first_error_gets_it():
    with pytest.raises(SystemExit):
        train([job("a"), in_callback(lambda: sys.exit(3))], on_error="raise")


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_an_interruption_in_a_jobs_code_carries_all_results(place: Callable[[Raise], carpool.Job]):
    with pytest.raises(Interrupted) as caught:
        train([job("a"), place(raising(KeyboardInterrupt())), job("b")])
    assert [result.name for result in caught.value.results] == ["a", "bad", "b"]
    assert Outcome.INTERRUPTED in {result.outcome for result in caught.value.results}


def test_a_reporter_that_exits_changes_nothing():
    def leaves(event: object) -> None:
        if isinstance(event, EpochEnded):
            sys.exit(1)

    with pytest.warns(UserWarning, match="exit code 1; the run goes on without it"):
        results = carpool.train([job("a")], device="cpu", reporters=[leaves])
    assert results[0].outcome is Outcome.COMPLETED


def exiting() -> nn.Module:
    sys.exit(7)


def test_in_a_worker_too_and_the_exit_code_is_told():
    seen: list[Any] = []
    results = carpool.train(
        [job("a"), job("bad", model=exiting, data=(X[:8], Y[:8]))],
        device="cpu",
        strategy="isolated",
        reporters=[seen.append],
    )
    assert [result.outcome.word for result in results] == ["completed", "failed"]
    assert isinstance(results["bad"].error, SystemExit)
    assert carpool.errors.described(results["bad"].error) == "SystemExit: exit code 7"
