"""The TensorFlow adapter: claims modules, describes jobs, opens sessions, hands results over."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from carpool.adapters.base import Adapter, JobState, Session, Trained
from carpool.adapters.place import Place
from carpool.adapters.tensorflow import memory, saved, trace
from carpool.adapters.tensorflow.alone import Alone
from carpool.adapters.tensorflow.arrays import Arrays, Store, build_arrays
from carpool.adapters.tensorflow.build import Built, build
from carpool.adapters.tensorflow.devices import check_place, chosen, place_of
from carpool.adapters.tensorflow.fuse import Known, ModuleFuser
from carpool.adapters.tensorflow.modules import is_module, variables
from carpool.adapters.tensorflow.optimizer import is_keras, is_optimizer
from carpool.adapters.tensorflow.predict import predict
from carpool.adapters.tensorflow.says import says
from carpool.adapters.tensorflow.session import RowsSession
from carpool.adapters.tensorflow.state import state_of, write
from carpool.adapters.tensorflow.stream_session import BatchSession, PipedSession
from carpool.adapters.tensorflow.streams import Piped, Streams, gathered, is_dataset, is_stream, piped
from carpool.adapters.tensorflow.xla import plain_reason
from carpool.ambient import kept
from carpool.arrays import Array
from carpool.errors import ModelError, OptimizerError
from carpool.job import Job
from carpool.memory.size import size
from carpool.planning.cursor import Course, Cursor
from carpool.planning.spec import ModelSpec, Signature


class TensorFlowAdapter(Adapter):
    """TensorFlow for one run: it remembers what it built for each job."""

    name = "tensorflow"

    def __init__(self, compile: str | bool = "auto") -> None:
        super().__init__(compile)
        self._known: dict[Job, Known] = {}
        self._cursors: dict[Job, Cursor] = {}
        self._owners: dict[int, tuple[Any, Job]] = {}
        self._made: dict[int, tuple[Any, Any]] = {}
        self._store, self._place = Store(), Place()
        self._streams = Streams(lambda place=self._place: place_of(place()))
        self.fuser = self._together = ModuleFuser(self._known.__getitem__, self._store, self._place)

    @classmethod
    def claims(cls, model: Any) -> bool:
        return is_module(model)

    def device(self, name: str) -> str:
        self._place.name = chosen(name)
        return self._place()

    def is_full(self, error: BaseException) -> bool:
        return super().is_full(error) or isinstance(error, tf.errors.ResourceExhaustedError)

    def describe(self, job: Job) -> ModelSpec:
        for thing in (job.model, job.optimizer):  # before anything is traced with what is another's
            if is_module(thing) or is_optimizer(thing):
                self._own(job, thing)
        with tf.device(place_of(self._place())):
            built = build(job, self._read)
        for held in built.variables:
            if held.trainable:
                self._own(job, held.variable)
        reason = plain_reason(built, self.compile, place_of(self._place()))
        signature = (*_signature(built), ("how it is compiled", "XLA" if reason is None else "plain"))
        self._known[job] = Known(built, signature, reason)
        return ModelSpec(
            str(job.name),
            self.name,
            signature,
            _course(built),
            state_bytes=sum(held.nbytes for held in (*built.variables, *built.others)),
            step_bytes=trace.output_bytes(built.once(built.any_size)),
            data=tuple(_data(built).items()),
            budget_bytes=None if job.budget is None else size(job.budget),
            note=_note(built, reason),
        )

    def _read(self, job: Job, data: Any, word: str) -> Any:
        """What the job names: what a function makes is made once for all jobs that name the function."""
        given, is_made = data, callable(data) and not is_stream(data)
        if is_made:
            data = self._once(given, given)
        if not is_stream(data):
            return build_arrays(job, data, word)
        if word != "data":
            return build_arrays(job, self._once(data, lambda: gathered(data, job.batch_size)), word)
        if is_dataset(data):
            return piped(job, data)
        return self._streams.of(job, data, given if is_made else None)

    def _once(self, named: Any, make: Callable[[], Any]) -> Any:
        """What is made of a thing that jobs name, which is held so that its id stays taken."""
        if id(named) not in self._made:
            with kept():
                self._made[id(named)] = (named, make())
        return self._made[id(named)][1]

    def _own(self, job: Job, thing: Any) -> None:
        """Raises where what training changes is another job's too."""
        _, other = self._owners.setdefault(id(thing), (thing, job))  # held, so that no id comes twice
        if other is job:
            return
        whole = f"this {type(thing).__name__} in job {other.name!r} too"
        if is_optimizer(thing):
            remedy = "pass a function that makes one, such as lambda: keras.optimizers.Adam(1e-3)"
            raise OptimizerError(says(job, "an optimizer of its own for each job", whole, remedy))
        received = whole if is_module(thing) else f"some of its variables in job {other.name!r} too"
        remedy = "pass a function that makes one, or a copy for each: copy.deepcopy(model)"
        raise ModelError(says(job, "a model of its own for each job", received, remedy))

    def open(self, job: Job, device: str, plain: bool = False, exact: bool = False) -> Session:
        known = self._known[job]
        built, place = known.built, place_of(device)
        check_place(built, place)
        if isinstance(built.data, Arrays):
            return Alone(RowsSession([built], self._store, place, is_jit=known.plain_reason is None))
        kind = PipedSession if isinstance(built.data, Piped) else BatchSession
        return kind(built, self._store, place)

    def absorb(self, job: Job, state: JobState) -> Trained:
        write(self._known[job].built, state)
        self._cursors[job] = state.cursor
        return self.trained(job)

    def trained(self, job: Job) -> Trained:
        if job not in self._known:
            return Trained(None)
        built = self._known[job].built
        return Trained(built.model, built.optimizer)

    def left(self, job: Job) -> JobState:
        return state_of(self._known[job].built, self._cursors.get(job))

    def weights(self, model: Any) -> Mapping[str, Array]:
        return saved.arrays_of(variables(model))

    def load_weights(self, model: Any, weights: Mapping[str, Array]) -> Any:
        saved.write(variables(model), weights)
        return model

    def optimizer_state(self, model: Any, optimizer: Any, scheduler: Any) -> Any:
        return saved.arrays_of(saved.state_variables(optimizer)) or None

    def load_optimizer(self, model: Any, optimizer: Any, scheduler: Any, state: Any) -> Any:
        trained = [held.variable for held in variables(model) if held.trainable]
        if is_keras(optimizer) and not optimizer.built:
            optimizer.build(trained)
        saved.write(saved.state_variables(optimizer), state)
        return optimizer

    def predict(self, models: Sequence[Any], inputs: Any, batch_size: int | None, device: str) -> list[Any]:
        return predict(models, inputs, batch_size, place_of(self.device(device)))

    def environment(self, jobs: Sequence[Job]) -> Mapping[str, str]:
        return memory.worker_environment(jobs)

    def close(self) -> None:
        self._streams.stop()
        self._store.clear()


def _signature(built: Built) -> Signature:
    """What jobs in one function have in common. Each has a loop of its own in it, so that what it computes may differ."""
    shapes = tuple((h.name, str(h.handles[0]._handle_data.shape_and_type)) for h in built.variables)
    entries: list[tuple[str, Hashable]] = [
        ("the module", f"{type(built.model).__module__}.{type(built.model).__qualname__}"),
        ("its variables", shapes),
        ("the optimizer", type(built.optimizer).__qualname__),
        ("a sample", built.data.shapes),
        ("batch size", built.first_size),
        ("how its data comes", type(built.data).__name__),
        ("what it shows", built.names),
    ]
    return tuple(entries)


def _course(built: Built) -> Course:
    job, data = built.job, built.data
    if isinstance(data, Arrays):
        return Course(data.length, job.batch_size, job.epochs)
    if isinstance(data, Piped):
        return Course((data.batches or 0) * data.size, data.size, job.epochs, streamed=True)
    return Course(0, 0, job.epochs, streamed=True)


def _data(built: Built) -> dict[Hashable, int]:
    held = [*built.data.leaves] if isinstance(built.data, Arrays) else []
    held += built.validation.leaves if built.validation is not None else ()
    return {id(leaf): _nbytes(leaf) for leaf in held}


def _nbytes(leaf: Any) -> int:
    kind = tf.as_dtype(leaf.dtype)
    count = 1
    for dim in leaf.shape:
        count *= int(dim)
    return count * (kind.size or 1)


def _note(built: Built, reason: str | None) -> str:
    """What the plan says of the job beside its strategy."""
    told = "XLA compiles its steps" if reason is None else f"its steps are a plain graph: {reason}"
    drawn = "" if built.random is None else f"{built.random} does not draw by the job's seed"
    return "; ".join(part for part in (told, drawn, memory.told(built.job)) if part)
