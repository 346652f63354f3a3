"""A training loop of one's own as a job: it runs beside everything else, a step at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carpool.arguments import MOST, Arguments, hinted, missing
from carpool.errors import JobError, sentence, shown
from carpool.job import Job
from carpool.memory.size import Size


@dataclass(frozen=True)
class OwnLoop:
    """A generator function with its arguments; every so many steps are a row of the history."""

    function: Callable[..., Iterator[Mapping[str, Any]]]
    arguments: tuple[Any, ...]
    every: int


@hinted
def Loop(  # reads like Job beside it
    function: Callable[..., Iterator[Mapping[str, Any]]],
    *arguments: Any,
    seed: int = 0,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    every: int = 100,
    callbacks: Sequence[Callable[[Any], None]] = (),
    budget: Size | None = None,
    priority: int = 0,
    share: float | None = None,
    timeout_s: float | None = None,
) -> Job:
    """A job that is a loop of your own: a generator function with one `yield {"loss": ...}` a step.

    It is interleaved with all other jobs and keeps its place at each yield; Python's, NumPy's and torch's random numbers
    are its own, from `seed` on. The means of every `every` steps are a row of its history. What it returns at its end
    is `result.model`. `budget` is the device memory it will take: it is opened when so much is free.

    >>> def count(to):
    ...     for i in range(to):
    ...         yield {"loss": float(i)}
    ...     return "done"
    >>> import carpool
    >>> result = carpool.train([Loop(count, 4, every=2)], device="cpu", reporters=[])[0]
    >>> result.history["loss"], result.model, result.steps
    ((0.5, 2.5), 'done', 4)
    """
    if not inspect.isgeneratorfunction(inspect.unwrap(getattr(function, "func", function))):
        raise JobError(
            sentence("a generator function", shown(function), 'write one `yield {"loss": ...}` in each step')
        )
    _check_arguments(function, arguments)
    every = Arguments(JobError).whole("every", every, "pass every=100", least=1, most=MOST)
    loop = OwnLoop(function, arguments, every)
    return Job(
        loop,
        (),
        name=name,
        config=config,
        seed=seed,
        callbacks=callbacks,
        budget=budget,
        priority=priority,
        epochs=1,
        share=share,
        timeout_s=timeout_s,
    )


def _check_arguments(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Whether the function can be called with these and no more."""
    wanted = missing(function, *arguments)
    if wanted is None:
        return
    word = getattr(getattr(function, "func", function), "__name__", "the function")
    received = f"none for {', '.join(wanted)}" if wanted else f"{len(arguments)} of them, which are too many"
    remedy = "pass them behind the function: carpool.Loop(function, model, data)"
    raise JobError(sentence(f"the arguments of {word}", received, remedy))
