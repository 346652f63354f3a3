"""`carpool.tensorflow.Graph`: a TensorFlow 1 graph as a job's model, which holds its variables' values after training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.adapters.graph import copying, loading, values
from carpool.adapters.graph.config import check as check_config
from carpool.adapters.graph.config import config as make_config
from carpool.adapters.graph.names import Names, name_of
from carpool.arguments import MOST, Arguments
from carpool.errors import ModelError, OptionError, sentence, shown
from carpool.job import Job

_v1 = tf.compat.v1
Built = tuple[tf.Graph, Mapping[str, Any]]


class Graph:
    """A TensorFlow 1 graph and what a step of it runs: a job's model.

    `graph` is a tf.Graph, or a function that builds into a fresh one, under the job's seed, and returns tensors and operations by name.
    `fetches` are tensors, operations or their names, by the names that results have; scalars are shown in the history. `train_op` is run
    at each step, beside them; `train_op=False` says that a graph with an optimizer is only run. `feeds` maps placeholders to values that stay, or
    is a function of the step's number, or an iterator, that gives a feed dict a step; the job's data is fed by name. A job without data runs
    `steps` steps, or until its input ends, and has a row of history every `every` steps.

    `init` initialises (all variables and tables, if left out): operations, or a function of the session. `saver` writes `checkpoints`, a path such as
    "run/model.ckpt", after every epoch; `restore` is a checkpoint, or a folder of them, to begin from. `summaries=(operation, folder)` writes a merged
    summary every `every` steps. `validation_feeds` stand in for `feeds` in validation. `config` is a tf.compat.v1.ConfigProto.

    Afterwards `variables` holds the variables' values by name, `values` what was fetched last (of a job without train_op all of it, in order), and
    the next training goes on from there.
    """

    def __init__(
        self,
        graph: tf.Graph | Callable[[], Mapping[str, Any]],
        fetches: Any,
        *,
        feeds: Any = None,
        train_op: Any = None,
        steps: int | None = None,
        init: Any = None,
        saver: Any = None,
        checkpoints: str | Path | None = None,
        restore: str | Path | None = None,
        summaries: tuple[Any, str | Path] | None = None,
        every: int = 100,
        validation_feeds: Mapping[Any, Any] | None = None,
        config: Any = None,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(graph, tf.Graph) and not callable(graph):
            raise ModelError(
                sentence(
                    "a tf.Graph, or a function that builds one", type(graph).__name__, "pass one of the two"
                )
            )
        says = Arguments()
        if steps is not None:
            steps = says.whole("steps", steps, "pass steps=100", 1, MOST)
        every = says.whole("every", every, "pass every=100", 1, MOST)
        for word, value in (("checkpoints", checkpoints), ("restore", restore)):
            if value is not None and not (isinstance(value, str | Path) and str(value).strip()):
                raise OptionError(
                    sentence(f"{word} as a path", shown(value), f'pass {word}="run/model.ckpt"')
                )
        if summaries is not None and not (isinstance(summaries, tuple) and len(summaries) == 2):
            raise OptionError(
                sentence("summaries=(operation, folder)", shown(summaries), "pass a pair, or leave it out")
            )
        if saver is not None and not callable(getattr(saver, "save", None)):
            raise OptionError(
                sentence("a saver with save()", shown(saver), "pass tf.compat.v1.train.Saver()")
            )
        if config is not None:
            check_config(config)
        if names is not None:
            says.mapping("names", names, 'pass names={"x": tensor}')
        if validation_feeds is not None and not isinstance(validation_feeds, Mapping):
            expected = "validation_feeds as a dict of values by placeholder"
            raise OptionError(sentence(expected, shown(validation_feeds), "pass {placeholder: value}"))
        if fetches is None or (isinstance(fetches, Mapping | Sequence) and not len(fetches)):
            raise ModelError(sentence("something to fetch", repr(fetches), 'pass fetches={"loss": loss}'))
        self.graph, self.fetches, self.feeds, self.train_op = graph, fetches, feeds, train_op
        self.steps, self.init, self.saver, self.every = steps, init, saver, every
        self.checkpoints, self.restore, self.summaries = checkpoints, restore, summaries
        self.validation_feeds, self.config = validation_feeds, config
        self.names: Mapping[str, Any] = dict(names or {})
        self.variables: dict[str, np.ndarray] = {}
        """The variables' values, once trained."""
        self.values: dict[str, np.ndarray] = {}
        """What was fetched."""
        self._built: Built | None = None

    @classmethod
    def frozen(cls, source: Any, fetches: Any, feeds: Any = None, **options: Any) -> Graph:
        """A frozen GraphDef, or the path of one, to be run: its results are what it fetches, in order."""
        return cls(loading.frozen(source), fetches, feeds=feeds, **options)

    @classmethod
    def saved_model(
        cls,
        path: str | Path,
        signature: str = "serving_default",
        tags: Sequence[str] = ("serve",),
        **options: Any,
    ) -> Graph:
        """A SavedModel of TensorFlow 1 (or 2) to be run: fed by the names of the signature's inputs, its outputs fetched."""
        found = loading.saved_model(path, signature, tags)
        return cls(
            found.graph, found.outputs, names=found.inputs, init=found.restoring, train_op=False, **options
        )

    def job(self, data: Any = (), **options: Any) -> Job:
        """A `carpool.Job` of it; jobs that run without data need none here."""
        return Job(self, data, **options)

    def build(self, seed: int = 0) -> Built:
        """The graph, and its elements by the names that its function gave them. It is built once, under the first seed."""
        if self._built is None:
            if isinstance(self.graph, tf.Graph):
                self._built = self.graph, self.names
            else:
                self._built = _built(self.graph, seed, self.names)
        return self._built

    @property
    def resolver(self) -> Names:
        return Names(*self.build())

    @contextmanager
    def session(self) -> Iterator[Any]:
        """A tf.compat.v1.Session on the graph with the trained values; closed at the end."""
        graph, _ = self.build()
        with _v1.Session(graph=graph, config=make_config(self.config)) as session:
            values.initialise(session, self.init, {}, self.resolver.element)
            values.write(session, self.variables)
            yield session

    def save(self, path: str | Path) -> str:
        """Writes the trained values as a checkpoint, by the graph's saver, or else by one of a copy of the graph."""
        path = Arguments().path("a checkpoint", path, 'pass "run/model.ckpt"')
        if self.saver is not None:
            with self.session() as session, session.graph.as_default():
                return self.saver.save(session, str(path))
        graph = copying.copied(self.build()[0])
        with graph.as_default(), _v1.Session(graph=graph) as session:
            saver = _v1.train.Saver()
            values.initialise(session, None, {}, Names(graph).element)
            values.write(session, self.variables)
            return saver.save(session, str(path))

    def __getstate__(self) -> dict[str, Any]:
        """For a worker: the graph as bytes, its elements by name."""
        state = dict(self.__dict__, _built=None)
        if isinstance(self.graph, tf.Graph):
            state["graph"] = copying.exported(self.graph)
            state |= {word: by_name(state[word]) for word in _NAMED}
            if self.saver is not None:
                state["saver"] = self.saver.as_saver_def()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.graph, bytes):
            self.graph = copying.imported(self.graph)
            if self.saver is not None:
                with self.graph.as_default():
                    self.saver = copying.saver_of(self.saver)


_NAMED = ("fetches", "feeds", "train_op", "init", "summaries", "validation_feeds", "names")


def by_name(nest: Any) -> Any:
    """The nest with names where it has elements of a graph, in keys too."""
    if isinstance(nest, Mapping):
        return {by_name(key): by_name(one) for key, one in nest.items()}
    if isinstance(nest, tuple | list):
        return type(nest)(by_name(one) for one in nest)
    is_element = isinstance(nest, tf.Operation | tf.Tensor | tf.Variable | _v1.Variable)
    return name_of(nest) if is_element else nest


def _built(build: Callable[[], Any], seed: int, names: Mapping[str, Any]) -> Built:
    graph = tf.Graph()
    with graph.as_default():
        _v1.set_random_seed(seed % 2**31)
        made = build()
    if isinstance(made, tf.Graph):
        return made, names
    if made is not None and not isinstance(made, Mapping):
        raise ModelError(
            sentence(
                "a function that returns tensors by name", type(made).__name__, 'return {"loss": loss, ...}'
            )
        )
    return graph, {**names, **(made or {})}
