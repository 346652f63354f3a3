"""From a job to what its session needs: elements of its graph, what is fed, and whatever can be refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.adapters.graph import copying
from carpool.adapters.graph.feeding import Arrays, Fed, Maker, arrays_of, maker, typed
from carpool.adapters.graph.model import Graph, by_name
from carpool.adapters.graph.names import Names
from carpool.adapters.graph.reach import changes, reached, unfed, updates, variables_in, waits
from carpool.errors import DataError, ModelError, sentence
from carpool.job import Job
from carpool.positions import positions
from carpool.source import Source

_IN_THE_GRAPH = ("loss", "step", "optimizer", "scheduler", "metrics", "clip_norm", "phases", "fit")


@dataclass(frozen=True)
class Built:
    """A job as its session needs it."""

    job: Job
    model: Graph
    names: Names
    fetches: Mapping[str, Any]
    train: tuple[Any, ...]
    """What is run at each step beside the fetches."""
    shown: Mapping[str, Any]
    """What is fetched in validation: what changes no variable."""
    constants: Fed
    maker: Maker | None
    data: Arrays | Source | None
    validation: Arrays | None
    validation_constants: Fed
    waits: bool
    used: set[str] = field(default_factory=set)
    """Names of the variables that its steps reach."""
    saver: Any = None
    summary: Any = None
    is_copied: bool = False
    changes: bool = True
    """Whether its steps change variables: else it is only run, and all that it fetches is its result."""

    @property
    def graph(self) -> tf.Graph:
        return self.names.graph

    def fed_now(self, given: Mapping[Any, Any]) -> dict[str, np.ndarray]:
        """A feed dict of the user's own by names of tensors."""
        found = {}
        for one, value in given.items():
            tensor = self.names.tensor(one, "a key of a feed dict")
            found[tensor.name] = typed(value, tensor)
        return found


def build(job: Job, shared: bool) -> Built:
    """`shared`: another job of the run has this tf.Graph already."""
    with named(job):
        return _built(job, job.model, shared)


@contextmanager
def named(job: Job) -> Iterator[None]:
    """What is refused inside says whose it is."""
    try:
        yield
    except (ModelError, DataError) as error:
        raise type(error)(f"Job {job.name!r}: {error}") from error


def _built(job: Job, model: Graph, shared: bool) -> Built:
    _refuse_options(job)
    graph, known = model.build(job.seed)
    names = Names(graph, known)
    if shared:
        names = Names(_own_copy(graph), _renamed(known), graph)
    fetches = names.fetches(model.fetches)
    train = () if model.train_op is None or model.train_op is False else _listed(model.train_op, names)
    constants = _constants(model.feeds, names)
    make = maker(model.feeds)
    data = _data(job, names)
    first = _first(data)
    wanted = [*fetches.values(), *train]
    known_feeds = [names.tensor(name, "feeds") for name in {**constants, **first}]
    run = reached(wanted, known_feeds)
    if make is None:  # else only its feed dicts can tell
        _refuse_unfed(run, known_feeds)
    _refuse_untrained(model, graph if not shared else names.graph, run)
    changing = {word for word, one in fetches.items() if changes(reached([one], known_feeds))}
    validation = _validation(job, names)
    if isinstance(data, Arrays) and not changes(run):
        data.shuffle = False  # results are in the order of the data
    return Built(
        job=job,
        model=model,
        names=names,
        fetches=fetches,
        train=train,
        shown={word: one for word, one in fetches.items() if word not in changing and _is_tensor(one)},
        constants=constants,
        maker=make,
        data=data,
        validation=validation,
        validation_constants={**constants, **_constants(model.validation_feeds, names)},
        waits=waits(run) or bool(names.graph.get_collection(tf.compat.v1.GraphKeys.QUEUE_RUNNERS)),
        used=variables_in(run),
        saver=_saver(model, names.graph, shared),
        summary=None if model.summaries is None else names.element(model.summaries[0], "summaries"),
        is_copied=shared,
        changes=changes(run),
    )


def _own_copy(graph: tf.Graph) -> tf.Graph:
    if why := copying.refusal(graph):
        raise ModelError(
            sentence(
                "a graph of its own for each job",
                f"one tf.Graph in two jobs, which cannot be copied: it has {why}",
                "pass a function that builds the graph",
            )
        )
    return copying.copied(graph)


def _renamed(known: Mapping[str, Any]) -> dict[str, str]:
    return by_name(dict(known))


def _refuse_options(job: Job) -> None:
    for word in _IN_THE_GRAPH:
        if getattr(job, word) is not None:
            raise ModelError(
                sentence(
                    f"a graph's job without {word}=", "one with it", "say it in the graph, or in its train_op"
                )
            )
    if job.accumulate != 1 or job.precision != "inherit":
        raise ModelError(sentence("accumulate and precision left out", "one of them", "say it in the graph"))


def _listed(given: Any, names: Names) -> tuple[Any, ...]:
    listed = given if isinstance(given, tuple | list) else (given,)
    return tuple(names.element(one, "train_op") for one in listed)


def _constants(feeds: Any, names: Names) -> dict[str, np.ndarray]:
    if not isinstance(feeds, Mapping):
        return {}
    tensors = [(names.tensor(one, "feeds"), value) for one, value in feeds.items()]
    return {tensor.name: typed(value, tensor) for tensor, value in tensors}


def _data(job: Job, names: Names) -> Arrays | Source | None:
    """Arrays by name, a stream of batches by name, or nothing: then the graph has its input in it, or in its feeds."""
    given: Any = job.data
    again: Any = given if callable(given) and not isinstance(given, Mapping) else None
    data = given if again is None else again()
    if isinstance(data, tuple | list) and not len(data):
        if job.model.steps is None and job.model.feeds is None and not _has_input(names.graph):
            raise DataError(
                sentence("data by name, or steps=", "neither", "pass Graph(..., steps=100), or data={...}")
            )
        if job.epochs != 1:
            raise DataError(
                sentence(
                    "epochs=1 for a job without data", str(job.epochs), "pass Graph(..., steps=...) for more"
                )
            )
        return None
    if isinstance(data, Mapping):
        arrays = arrays_of(data, names.tensor, "data")
        length = len(next(iter(arrays.values())))
        view = positions(job.index, length, job.name)
        places = np.arange(length) if view is None else view
        return Arrays(arrays, places, job.batch_size, job.seed, job.shuffle)
    if isinstance(data, Iterable) and not isinstance(data, tuple | list | np.ndarray):
        return _stream(job, data, names, again)
    raise DataError(
        sentence(
            "data by the names of placeholders",
            type(data).__name__,
            'pass data={"x": x, "y": y}, or something that gives such batches',
        )
    )


def _has_input(graph: tf.Graph) -> bool:
    """Whether the graph ends by itself: it reads queues or an iterator."""
    return any("Queue" in one.type or "Iterator" in one.type for one in graph.get_operations())


def _stream(job: Job, data: Any, names: Names, again: Callable[[], Any] | None) -> Source:
    if job.index is not None:
        raise DataError(sentence("index= beside arrays", type(data).__name__, "leave index= out"))
    held = [data]

    def passes(epoch: int) -> Iterable[Any]:
        made = data if again is None else held.pop() if held else again()
        return made.as_numpy_iterator() if hasattr(made, "as_numpy_iterator") else made

    def prepared(batch: Any) -> dict[str, np.ndarray]:
        if not isinstance(batch, Mapping):
            raise DataError(
                sentence("batches by the names of placeholders", type(batch).__name__, 'yield {"x": ...}')
            )
        return arrays_of(batch, names.tensor, "a batch")

    return Source(passes, job.prefetch, prepared)


def _first(data: Arrays | Source | None) -> dict[str, Any]:
    """Names of what a step is fed beside values that stay, as far as that is known before it runs."""
    if isinstance(data, Arrays):
        return dict(data.arrays)
    return dict(data.first()) if isinstance(data, Source) else {}


def _validation(job: Job, names: Names) -> Arrays | None:
    if job.validation_data is None:
        return None
    given = job.validation_data() if callable(job.validation_data) else job.validation_data
    if not isinstance(given, Mapping):
        raise DataError(
            sentence("validation_data by name", type(given).__name__, 'pass validation_data={"x": x}')
        )
    arrays = arrays_of(given, names.tensor, "validation_data")
    places = np.arange(len(next(iter(arrays.values()))))
    return Arrays(arrays, places, job.batch_size, job.seed, shuffle=False)


def _refuse_unfed(run: Any, fed: list[Any]) -> None:
    if missing := unfed(run, fed):
        raise ModelError(
            sentence(
                "a value for every placeholder that a step reaches",
                f"none for {', '.join(map(repr, missing[:5]))}",
                "name it in data=, or in Graph(..., feeds={...})",
            )
        )


def _refuse_untrained(model: Graph, graph: tf.Graph, run: Any) -> None:
    if model.train_op is not None or updates(run):
        return
    if left := updates(graph.get_operations()):
        raise ModelError(
            sentence(
                "a train_op for a graph with an optimizer",
                f"none, though {left[0]!r} is in the graph",
                "pass train_op=, or train_op=False to run the graph without training it",
            )
        )


def _saver(model: Graph, graph: tf.Graph, shared: bool) -> Any:
    """What writes the job's checkpoints."""
    if model.checkpoints is None:
        return None
    if model.saver is not None:
        with graph.as_default():
            return copying.saver_of(model.saver.as_saver_def()) if shared else model.saver
    if graph.finalized:
        raise ModelError(
            sentence(
                "a saver for checkpoints of a finalized graph",
                "none, and nothing can be added to it",
                "build tf.compat.v1.train.Saver() before graph.finalize(), and pass saver=",
            )
        )
    with graph.as_default():
        return tf.compat.v1.train.Saver()


def _is_tensor(element: Any) -> bool:
    return not isinstance(element, tf.Operation)
