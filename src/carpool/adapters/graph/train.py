"""The adapter for TensorFlow 1 graphs: claims `Graph`, describes jobs, opens sessions, hands values over."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import tensorflow as tf

from carpool.adapters.base import Adapter, JobState, Trained
from carpool.adapters.graph.build import Built, build, named
from carpool.adapters.graph.config import fraction_of
from carpool.adapters.graph.feeding import Arrays
from carpool.adapters.graph.model import Graph
from carpool.adapters.graph.session import GraphSession, held_in, job_state
from carpool.adapters.graph.values import variables_of
from carpool.arrays import Array
from carpool.errors import DeviceError, ModelError, sentence
from carpool.job import Job
from carpool.memory.size import shown, size
from carpool.planning.cursor import Course
from carpool.planning.spec import ModelSpec
from carpool.source import Source


class GraphAdapter(Adapter):
    """TensorFlow 1 graphs for one run. They cannot be stacked: each has its session, and they run side by side."""

    name = "tensorflow-graph"
    fuser = None

    def __init__(self, compile: str | bool = "auto") -> None:
        super().__init__(compile)
        self._built: dict[Job, Built] = {}
        self._owners: dict[int, Job] = {}
        self._graphs: dict[int, Job] = {}

    @classmethod
    def claims(cls, model: Any) -> bool:
        return isinstance(model, Graph | tf.Graph)

    def device(self, name: str) -> str:
        gpus = len(tf.config.list_physical_devices("GPU"))
        known = ["cpu", *(f"cuda:{number}" for number in range(gpus))]
        place = known[min(1, gpus)] if name == "auto" else "cuda:0" if name == "cuda" and gpus else name
        if place not in known:
            raise DeviceError(
                sentence(f"a device out of auto, {', '.join(known)}", repr(name), 'pass device="auto"')
            )
        return place

    def is_full(self, error: BaseException) -> bool:
        return super().is_full(error) or isinstance(error, tf.errors.ResourceExhaustedError)

    def describe(self, job: Job) -> ModelSpec:
        self._refuse(job)
        with named(job):
            graph, _ = job.model.build(job.seed)
        first = self._graphs.setdefault(id(graph), job)
        built = self._built[job] = build(job, shared=first is not job)
        variables = variables_of(built.graph).values()
        budget = None if job.budget is None else size(job.budget)
        return ModelSpec(
            str(job.name),
            self.name,
            (("a graph of TensorFlow 1", True),),
            _course(built),
            state_bytes=sum(_bytes(one) for one in variables),
            step_bytes=0,
            data=_data_bytes(built),
            budget_bytes=budget,
            note=_note(built, first, budget),
        )

    def _refuse(self, job: Job) -> None:
        if isinstance(job.model, tf.Graph):
            raise ModelError(
                f"Job {job.name!r}: "
                + sentence(
                    "a tf.Graph with what to fetch and run",
                    "a tf.Graph alone",
                    "pass carpool.tensorflow.Graph(graph, fetches, train_op=...)",
                )
            )
        other = self._owners.setdefault(id(job.model), job)
        if other is not job:
            raise ModelError(
                f"Job {job.name!r}: "
                + sentence(
                    "a carpool.tensorflow.Graph of its own for each job, to hold its values",
                    f"the one of job {other.name!r}",
                    "make one for each; they may name one tf.Graph, which is copied",
                )
            )

    def open(self, job: Job, device: str, plain: bool = False, exact: bool = False) -> GraphSession:
        cap = fraction_of([job.budget]) if device != "cpu" else None
        return GraphSession(self._built[job], _place(device), cap)

    def absorb(self, job: Job, state: JobState) -> Trained:
        job.model.variables, job.model.values = held_in(state)
        return self.trained(job)

    def trained(self, job: Job) -> Trained:
        return Trained(job.model, value=dict(job.model.values) or None)

    def left(self, job: Job) -> JobState:
        return job_state(job.model.variables, job.model.values)

    def weights(self, model: Any) -> Mapping[str, Array]:
        return {name: Array.of(value) for name, value in model.variables.items()}

    def load_weights(self, model: Any, weights: Mapping[str, Array]) -> Any:
        model.variables = {name: array.numpy() for name, array in weights.items()}
        return model

    def close(self) -> None:
        for built in self._built.values():
            if isinstance(built.data, Source):
                built.data.stop()


def _course(built: Built) -> Course:
    job, model = built.job, built.model
    if isinstance(built.data, Arrays):
        return Course(built.data.length, job.batch_size, job.epochs)
    if isinstance(built.data, Source):
        return Course(0, 0, job.epochs, streamed=True)
    rows = 1 << 30 if model.steps is None else -(-model.steps // model.every)
    return Course(0, 0, rows, streamed=True)


def _place(device: str) -> Mapping[str, Any]:
    """Where a session's operations may be."""
    if device == "cpu":
        return {"device_count": {"GPU": 0}}
    number = device.partition(":")[2] or "0"
    return {"gpu_options": tf.compat.v1.GPUOptions(visible_device_list=number)}


def _data_bytes(built: Built) -> tuple[tuple[Hashable, int], ...]:
    held = [one.arrays.values() for one in (built.data, built.validation) if isinstance(one, Arrays)]
    return tuple({id(array): array.nbytes for arrays in held for array in arrays}.items())


def _bytes(variable: Any) -> int:
    count = variable.shape.num_elements() or 0
    return count * variable.dtype.size


def _note(built: Built, first: Job, budget: int | None) -> str:
    notes = []
    if built.is_copied:
        notes.append(f"its graph is a copy: {first.name!r} has the same tf.Graph")
    if budget is not None:
        notes.append(f"its session is told to take {shown(budget)} of a GPU")
    return "; ".join(notes)
