"""Models of jobs that name one factory, made at once: a sweep of a thousand seeds calls it a few times instead of a thousand.

The factory is mapped over the jobs' keys, operation by operation as it would run alone, so that every member has the bits of its own call. That is
looked at: the first and the last member are made alone too, and unless they are the same bits, every job calls the factory for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from carpool.adapters.jax.forms import Form, Parts, form_of, kind_of
from carpool.adapters.jax.keys import init_key, init_keys
from carpool.ambient import drawn, seeded
from carpool.errors import failure
from carpool.job import Job

FEWEST = 8
"""Jobs that it pays for."""
_MOST_BYTES = 1 << 30  # on the device at a time


class Factories:
    """The parts of models that were made together, by job, on the host."""

    def __init__(self) -> None:
        self._alike: dict[int, list[Job]] = {}
        self._made: dict[Job, tuple[Form, Parts]] = {}

    def expect(self, jobs: Sequence[Job]) -> None:
        """All of a run's jobs, before the first of them is built."""
        for job in jobs:
            if callable(job.model) and kind_of(job.model) is None:
                self._alike.setdefault(id(job.model), []).append(job)

    def made(self, job: Job) -> tuple[Form, Parts] | None:
        """The form and the parts of the job's model, or None where its factory is to be called."""
        alike = self._alike.pop(id(job.model), ())
        if len(alike) >= FEWEST:
            self._made |= _together(alike)
        return self._made.pop(job, None)


def _together(jobs: Sequence[Job]) -> dict[Job, tuple[Form, Parts]]:
    """The jobs' models, which one factory makes; nothing where each has to be made for itself."""
    factory: Any = jobs[0].model
    try:
        with seeded(jobs[0].seed), drawn() as generators:
            form = form_of(factory(init_key(jobs[0].seed)))
        if generators:
            return {}
        if form is None:
            return {}
        ends = [form.split(factory(init_key(job.seed))) for job in (jobs[0], jobs[-1])]
        if any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(ends)):
            return {}  # a type that NumPy has no word for
        size = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(ends[0]))
        members = _mapped(lambda key: form.split(factory(key)), jobs, max(1, _MOST_BYTES // max(1, size)))
    except BaseException as error:  # whatever is wrong, calling it for each job shows it as the user wrote it
        failure(error)
        return {}
    if not all(_same(own, made) for own, made in zip(ends, (members[0], members[-1]), strict=True)):
        return {}
    return {job: (form, parts) for job, parts in zip(jobs, members, strict=True)}


def _mapped(make: Callable[[Any], Parts], jobs: Sequence[Job], at_once: int) -> list[Parts]:
    members: list[Parts] = []
    for start in range(0, len(jobs), at_once):
        chosen = jobs[start : start + at_once]
        stack = jax.device_get(jax.vmap(make)(init_keys([job.seed for job in chosen])))
        leaves, tree = jax.tree.flatten(stack)
        members += [
            jax.tree.unflatten(tree, [np.asarray(leaf[row]) for leaf in leaves]) for row in range(len(chosen))
        ]
    return members


def _same(own: Parts, made: Parts) -> bool:
    """Whether two members are the same, bit by bit."""
    (left, tree), (right, other) = jax.tree.flatten(jax.device_get(own)), jax.tree.flatten(made)
    return tree == other and all(
        np.asarray(a).dtype == b.dtype and np.asarray(a).tobytes() == b.tobytes()
        for a, b in zip(left, right, strict=True)
    )
