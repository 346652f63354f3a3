"""Every combination of the axes as a lazy sequence of jobs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, overload

from carpool.arguments import Arguments, missing
from carpool.errors import JobError, meant, sentence, shown
from carpool.job import Job


def grid(make_job: Callable[..., Job], **axes: Iterable[Any]) -> Grid:
    """One job for every combination of the axes, the last axis fastest; built when it is read.

    Names are like "lr=0.001,seed=3" and `job.config` holds the combination.

    >>> jobs = grid(lambda lr, seed: Job(dict, ([1.0], [2.0]), loss=max, seed=seed), lr=[0.1, 0.01], seed=range(2))
    >>> len(jobs), jobs[1].name, jobs[-1].config
    (4, 'lr=0.1,seed=1', {'lr': 0.01, 'seed': 1})
    """
    Arguments(JobError).function("make_job", make_job, "pass a function that returns a carpool.Job")
    _check_axes(make_job, axes)
    return Grid(make_job, {name: _values(name, values) for name, values in axes.items()})


def _check_axes(make_job: Callable[..., Job], axes: Iterable[str]) -> None:
    """Whether the function takes these axes, and wants no others."""
    try:
        parameters = inspect.signature(make_job).parameters
    except (TypeError, ValueError):  # it does not say
        return
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    taken = [name for name, one in parameters.items() if one.kind is not one.VAR_POSITIONAL]
    word = f"{getattr(make_job, '__name__', 'the function')}({', '.join(taken)})"
    if stray := next((name for name in axes if name not in taken), None):
        remedy = meant(stray, taken) or "name an axis as its argument is named"
        raise JobError(sentence(f"axes that {word} takes", repr(stray), remedy))
    if wanted := [name for name in missing(make_job) or () if name not in axes]:
        remedy = f"pass {wanted[0]}=[...], or give it a value where the function is written"
        raise JobError(sentence(f"every axis that {word} needs", f"none for {wanted[0]!r}", remedy))


def _values(name: str, values: Any) -> tuple[Any, ...]:
    """An axis' values; a text is one value, and a set has no order."""
    try:
        return tuple(Arguments(JobError).listed("values", values, ""))
    except (JobError, TypeError):
        received = f"{name}={shown(values)}"
        remedy = f"pass {name}=sorted(...)" if isinstance(values, set) else f"pass {name}=[{shown(values)}]"
        raise JobError(sentence(f"a list of values for axis {name!r}", received, remedy)) from None


class Grid(Sequence[Job]):
    """The sequence behind `grid`."""

    def __init__(self, make_job: Callable[..., Job], axes: dict[str, tuple[Any, ...]]) -> None:
        for name, values in axes.items():
            if not values:
                raise JobError(sentence(f"values for axis {name!r}", "none", "pass at least one value"))
        self._make_job = make_job
        self._axes = axes

    def __len__(self) -> int:
        return math.prod(len(values) for values in self._axes.values())

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Job]: ...
    def __getitem__(self, index: int | slice) -> Job | Sequence[Job]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        config: dict[str, Any] = {}
        for name, values in reversed(self._axes.items()):
            position, choice = divmod(position, len(values))
            config[name] = values[choice]
        config = dict(reversed(config.items()))
        job = self._make_job(**config)
        if not isinstance(job, Job):
            raise JobError(
                sentence("the function given to grid to return a carpool.Job", repr(job), "return the Job")
            )
        name = job.name or ",".join(f"{key}={_shown(value)}" for key, value in config.items()) or None
        return replace(job, name=name, config={**(job.config or {}), **config})


def _shown(value: Any) -> str:
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return getattr(value, "__name__", None) or str(value)
