"""The JAX adapter: claims nests of arrays and modules, describes jobs by their traces, opens sessions, hands results over."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from carpool.adapters.base import Adapter, JobState, Trained
from carpool.adapters.jax import saved
from carpool.adapters.jax.build import Arrays, Built, build, build_arrays, says
from carpool.adapters.jax.devices import chosen, device_of
from carpool.adapters.jax.factories import Factories
from carpool.adapters.jax.forms import Parts, kind_of
from carpool.adapters.jax.functions import sizes
from carpool.adapters.jax.fuse import JaxFuser
from carpool.adapters.jax.optimizer import Beginnings, given_back, is_nnx, state_of
from carpool.adapters.jax.pool import Store
from carpool.adapters.jax.predict import predict
from carpool.adapters.jax.program import State
from carpool.adapters.jax.recipe import Kind, Recipes, shapes
from carpool.adapters.jax.session import StackedSession
from carpool.adapters.jax.state import restored, stacked, unstacked
from carpool.adapters.jax.streams import Streamed, Streams, gathered, is_stream
from carpool.adapters.place import Place
from carpool.ambient import kept
from carpool.arrays import Array
from carpool.errors import ModelError, OptimizerError
from carpool.job import Job
from carpool.memory.size import size
from carpool.planning.cursor import Course, Cursor
from carpool.planning.spec import ModelSpec, Signature


class JaxAdapter(Adapter):
    """JAX for one run: it remembers what it built for each job."""

    name = "jax"

    def __init__(self, compile: str | bool = "auto") -> None:
        super().__init__(compile)
        self._built: dict[Job, Built] = {}
        self._trained: dict[Job, Trained] = {}
        self._cursors: dict[Job, Cursor] = {}
        self._owners: dict[int, Job] = {}
        self._recipes, self._store = Recipes(), Store()
        self._factories, self._begin = Factories(), Beginnings()
        self._place = Place()
        self._made: dict[int, tuple[Any, Any]] = {}
        self._bytes: dict[int, tuple[Any, int]] = {}
        self._streams = Streams(lambda place=self._place: device_of(place()))
        self.fuser = JaxFuser(self._built.__getitem__, self._recipes, self._store)

    @classmethod
    def claims(cls, model: Any) -> bool:
        return kind_of(model) is not None

    def device(self, name: str) -> str:
        self._place.name = chosen(name)
        return self._place()

    def is_full(self, error: BaseException) -> bool:
        return super().is_full(error) or "RESOURCE_EXHAUSTED" in str(error)

    def expect(self, jobs: Sequence[Job]) -> None:
        self._factories.expect(jobs)

    def describe(self, job: Job) -> ModelSpec:
        built = self._built[job] = build(job, self._read, self._factories, self._begin)
        self._refuse_shared(built)
        streamed = isinstance(built.data, Streamed)
        held = (*built.data.leaves, *(built.validation.leaves if built.validation else ()))
        data: dict[Hashable, int] = {id(leaf): leaf.nbytes for leaf in held}
        state = jax.tree.leaves((built.parts, built.state))
        return ModelSpec(
            str(job.name),
            self.name,
            self._signature(built),
            Course(built.data.length, job.batch_size, job.epochs, streamed),
            sum(np.asarray(leaf).nbytes if isinstance(leaf, float | int) else leaf.nbytes for leaf in state),
            self._step_bytes(built),
            tuple(data.items()),
            None if job.budget is None else size(job.budget),
        )

    def _read(self, job: Job, data: Any, word: str) -> Arrays:
        """What the job names: what a function makes is made once for all jobs that name the function."""
        given, is_made = data, callable(data) and not is_stream(data)
        if is_made:
            data = self._once(given, given)
        if not is_stream(data):
            return build_arrays(job, data, word)
        if word == "data":
            return self._streams.of(job, data, given if is_made else None)
        whole = self._once(data, lambda: gathered(data, job.batch_size))
        return build_arrays(job, whole, word)

    def _once(self, named: Any, make: Callable[[], Any]) -> Any:
        """What is made of a thing that jobs name, which is held so that its id stays taken."""
        if id(named) not in self._made:
            with kept():
                self._made[id(named)] = (named, make())
        return self._made[id(named)][1]

    def _refuse_shared(self, built: Built) -> None:
        """Raises where objects that training changes are another job's too."""
        job = built.job
        optimizer = (job.optimizer,) if is_nnx(job.optimizer) else ()
        owned = () if built.model is None else built.form.owned(built.model)
        for thing in (*owned, *optimizer):
            other = self._owners.setdefault(id(thing), job)
            if other is job:
                continue
            is_whole = thing is built.model or thing is job.optimizer
            shared = f"this {type(thing).__name__}" if is_whole else "some of its variables"
            received = f"{shared} in job {other.name!r} too"
            if thing is job.optimizer:
                remedy = "make one for each, or pass the optax optimizer"
                raise OptimizerError(says(job, "an optimizer of its own for each job", received, remedy))
            remedy = "pass a factory, or a copy for each: nnx.clone(model)"
            raise ModelError(says(job, "a model of its own for each job", received, remedy))

    def _signature(self, built: Built) -> Signature:
        """What its traces say, numbers apart."""
        first = max(sizes(built))
        entries: list[tuple[str, Hashable]] = [
            ("parameters", _shown(built.parts.trained)),
            ("what is held beside them", _shown(built.parts.rest)),
            ("a sample", built.data.shapes),
            ("batch size", first),
            ("how its data comes", "in batches" if isinstance(built.data, Streamed) else "as arrays"),
            ("the gradient's trace", self._recipes.gradient(built, first).text),
            ("the optimizer's state", _shown(built.state)),
            ("the update's trace", self._recipes.update(built).text),
        ]
        if built.validation is not None:
            first = min(built.job.batch_size, built.validation.length)
            entries.append(("the validation's trace", self._recipes.evaluate(built, first).text))
        return tuple(entries)

    def _step_bytes(self, built: Built) -> int:
        """What the gradient's trace makes on the way, half of it at a time: a guess on the safe side."""
        made = self._recipes.gradient(built, max(sizes(built))).closed
        if id(made) not in self._bytes:
            total = sum(_bytes(var.aval) for eqn in made.jaxpr.eqns for var in eqn.outvars) // 2
            self._bytes[id(made)] = (made, total)
        return self._bytes[id(made)][1]

    def open(self, job: Job, device: str, plain: bool = False, exact: bool = False) -> StackedSession:
        return StackedSession([self._built[job]], self._recipes, self._store, device_of(device))

    def absorb(self, job: Job, state: JobState) -> Trained:
        built = self._built[job]
        own = restored(state, State(built.parts.trained, built.parts.rest, built.state))
        own = jax.device_put(own)
        parts = Parts(own.trained, own.rest)
        model = built.form.merge(parts) if built.model is None else built.form.given_back(built.model, parts)
        optimizer = given_back(job.optimizer, own.optimizer, state.cursor.step)
        self._trained[job], self._cursors[job] = Trained(model, optimizer), state.cursor
        return self._trained[job]

    def trained(self, job: Job) -> Trained:
        if job in self._trained:
            return self._trained[job]
        built = self._built.get(job)
        if built is None:
            return Trained(None)
        model = built.form.merge(jax.device_put(built.parts)) if built.model is None else built.model
        return Trained(model, job.optimizer if is_nnx(job.optimizer) else built.state)

    def left(self, job: Job) -> JobState:
        trained, built = self.trained(job), self._built[job]
        parts = built.form.split(trained.model)
        optimizer = state_of(trained.optimizer, built.state)
        (held,) = unstacked(stacked([State(parts.trained, parts.rest, optimizer)]), [0])
        return replace(held, cursor=self._cursors.get(job, held.cursor))

    def weights(self, model: Any) -> Mapping[str, Array]:
        return saved.weights(model)

    def load_weights(self, model: Any, weights: Mapping[str, Array]) -> Any:
        return saved.load_weights(model, weights)

    def optimizer_state(self, model: Any, optimizer: Any, scheduler: Any) -> Any:
        return saved.optimizer_state(optimizer)

    def load_optimizer(self, model: Any, optimizer: Any, scheduler: Any, state: Any) -> Any:
        return saved.load_optimizer(optimizer, state)

    def predict(self, models: Sequence[Any], inputs: Any, batch_size: int | None, device: str) -> list[Any]:
        return predict(models, inputs, batch_size, device)

    def close(self) -> None:
        self._streams.stop()
        self._store.clear()


def _shown(nest: Any) -> Hashable:
    """Names, shapes and types of a nest's arrays."""
    return _named(*shapes(nest))


@lru_cache(maxsize=256)
def _named(tree: Any, kinds: Sequence[Kind]) -> Hashable:
    found, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, kinds), is_leaf=_is_kind)
    canonical = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    return tuple((jax.tree_util.keystr(path), shape, str(canonical(kind))) for path, (shape, kind) in found)


def _is_kind(nest: Any) -> bool:
    return isinstance(nest, Kind)


def _bytes(aval: Any) -> int:
    return (
        int(np.prod(aval.shape, dtype=np.int64)) * getattr(aval.dtype, "itemsize", 8)
        if hasattr(aval, "shape")
        else 0
    )
