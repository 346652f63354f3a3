"""Which JAX jobs stand in one stack, and how their rows are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carpool.adapters.base import Fuser, Prepared
from carpool.adapters.jax.build import Built
from carpool.adapters.jax.devices import device_of
from carpool.adapters.jax.functions import sizes
from carpool.adapters.jax.pool import Store
from carpool.adapters.jax.recipe import Recipes
from carpool.adapters.jax.session import StackedSession
from carpool.adapters.jax.streams import Streamed
from carpool.job import Job


class JaxFuser(Fuser):
    """Jobs with equal signatures have equal traces but for numbers: those become inputs of one program."""

    def __init__(self, built: Callable[[Job], Built], recipes: Recipes, store: Store) -> None:
        self._built, self._recipes, self._store = built, recipes, store

    def refusal(self, jobs: Sequence[Job]) -> str | None:
        built = self._built(jobs[0])
        sources = {id(d.source) for job in jobs if isinstance(d := self._built(job).data, Streamed)}
        if len(sources) > 1:
            return "they read streams of their own: name one loader in all of them to read it once for all"
        if not self._recipes.gradient(built, max(sizes(built))).is_pure:
            return "its step calls back to Python or prints, which a stack would do once for all"
        return None

    def open(
        self, jobs: Sequence[Job], width: int, device: str, prepared: Prepared = lambda *_: None
    ) -> StackedSession:
        builts = [self._built(job) for job in jobs]
        return StackedSession(builts, self._recipes, self._store, device_of(device), prepared=prepared)
