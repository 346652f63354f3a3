"""What a job's own code may raise that is no ordinary exception, and what is asked of the run then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import carpool
from carpool import Outcome

Go = Callable[..., NoReturn]


class Odd(BaseException):
    """One that nobody has heard of."""


KINDS: list[type[BaseException]] = [SystemExit, asyncio.CancelledError, Odd]


def raising(kind: type[BaseException]) -> Go:
    def go(*_: Any, **__: Any) -> NoReturn:
        raise kind

    return go


def assert_ends_alone(
    good: Callable[[str], carpool.Job], bad: carpool.Job, kind: type[BaseException]
) -> None:
    """The job fails with what it raised, and those beside it train to their ends."""
    results = carpool.train([good("a"), bad, good("b")], device="cpu", compile=False, reporters=[])
    outcomes = [result.outcome for result in results]
    assert outcomes == [Outcome.COMPLETED, Outcome.FAILED, Outcome.COMPLETED]
    assert type(results[1].error) is kind


def looping(go: Go) -> carpool.Job:
    """A loop that raises after its first step."""

    def steps() -> Any:
        yield {"loss": 1.0}
        go()

    return carpool.Loop(steps, name="bad")
