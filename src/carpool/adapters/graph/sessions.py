"""Sessions side by side in a loop of the user's own: futures for what is run, and everything closed at the end, whatever happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import tensorflow as tf

from carpool.adapters.graph import copying, values
from carpool.adapters.graph.config import config as make_config
from carpool.adapters.graph.config import fraction_of, inside_of, told
from carpool.adapters.graph.model import Graph
from carpool.adapters.graph.names import Names
from carpool.adapters.graph.queues import Runners
from carpool.adapters.graph.reach import waits
from carpool.arguments import Arguments
from carpool.errors import ModelError, OptionError, sentence
from carpool.memory.size import Size, limit

_v1 = tf.compat.v1


class OpenSession:
    """One session among others: runs here, or in its own thread, in the order in which it was asked."""

    def __init__(self, name: str, names: Names, init: Any, made: Any, threads: int) -> None:
        self.name, self._names = name, names
        self.tf, self._inside = _v1.Session(graph=names.graph, config=made), inside_of(made)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"carpool session {name}")
        self._runners: Runners | None = None
        try:
            if init is not False:
                values.initialise(self.tf, init, {}, names.element)
            self._runners = Runners(self.tf)
        except BaseException:
            self.close()
            raise

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """What `tf.compat.v1.Session.run` returns; fetches and keys may be names."""
        wanted, feeds = _elements(fetches, self._names), _feeds(feed_dict or {}, self._names)
        with self._inside():
            return self.tf.run(wanted, feeds)

    def run_async(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Future[Any]:
        """The same in the session's own thread: a future of it."""
        return self._threads.submit(self.run, fetches, feed_dict)

    def variables(self) -> dict[str, Any]:
        """The variables' values by name."""
        return values.read(self.tf)

    def close(self) -> None:
        """Ends what is running and forgets what waits."""
        if self._runners is not None:
            self._runners.stop()
        self.tf.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


class Sessions(Mapping[str, OpenSession]):
    """Open sessions by name. `caps` says what each was told of memory."""

    def __init__(self, opened: Mapping[str, OpenSession], caps: str, stack: ExitStack) -> None:
        self._opened, self.caps, self._stack = dict(opened), caps, stack

    def __getitem__(self, name: str) -> OpenSession:
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened)

    def __len__(self) -> int:
        return len(self._opened)

    def __enter__(self) -> Sessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all of them; an error of one does not keep the others open."""
        self._stack.close()


def sessions(
    graphs: Mapping[str, Any],
    *,
    memory: Mapping[str, Size] | None = None,
    init: Any = None,
    threads: int = 1,
    config: Any = None,
) -> Sessions:
    """A session for each graph, open side by side until the `with` ends.

    A graph is a tf.Graph, a carpool.tensorflow.Graph (with the values that it holds), or a function that builds into a fresh graph. Variables and tables are
    initialised, unless `init=False`; queue runners are started, and stopped. `memory` caps what they take of a GPU; without a cap they grow as needed.
    `threads` is how many runs of one session may be under way: its futures are carried out in order when it is 1.

    >>> import tensorflow as tf
    >>> def doubled():
    ...     x = tf.compat.v1.placeholder(tf.float32, name="x")
    ...     return {"y": 2.0 * x}
    >>> with sessions({"a": doubled, "b": doubled}) as s:
    ...     asked = [s[name].run_async("y", {"x": 1.5}) for name in s]
    ...     [float(one.result()) for one in asked]
    [3.0, 3.0]
    """
    _check(graphs, {} if memory is None else memory)
    threads = Arguments().whole("threads", threads, "pass threads=1", 1, 1 << 10)
    caps = {name: (memory or {}).get(name) for name in graphs}
    fraction = fraction_of(list(caps.values()))
    seen: list[tf.Graph] = []
    opened: dict[str, OpenSession] = {}
    with ExitStack() as stack:
        for name, given in graphs.items():
            graph, known = _graph(given)
            names = Names(graph, known)
            if any(graph is other for other in seen):
                names = Names(copying.copied(graph), None, graph)
            seen.append(graph)
            in_caller = not waits(graph.get_operations())
            base = config if config is not None else getattr(given, "config", None)
            made = make_config(base, in_caller, fraction)
            first = given.init if init is None and isinstance(given, Graph) else init
            opened[name] = OpenSession(name, names, first, made, threads)
            stack.callback(opened[name].close)
            if isinstance(given, Graph):
                values.write(opened[name].tf, given.variables)
        return Sessions(opened, told(caps), stack.pop_all())


def run(
    graph: Any,
    fetches: Mapping[str, Any],
    *,
    feeds: Mapping[Any, Any] | None = None,
    init: Any = None,
    session: Any = None,
) -> dict[str, Any]:
    """Several models' fetches of one graph, each run from a thread of its own in one session: what was fetched, by name.

    `feeds` is one feed dict for all of them, or one for each, by the same names. `session` is one of yours to run in, which is left open and as
    initialised as it is; without it one is opened, initialised and closed.

    >>> import tensorflow as tf
    >>> with tf.Graph().as_default() as graph:
    ...     x = tf.compat.v1.placeholder(tf.float32, name="x")
    ...     fetched = {"double": x * 2.0, "square": x * x}
    >>> made = run(graph, fetched, feeds={"x": 3.0})
    >>> float(made["double"]), float(made["square"])
    (6.0, 9.0)
    """
    if not isinstance(fetches, Mapping) or not fetches:
        raise ModelError(sentence("fetches by name", repr(fetches)[:60], 'pass {"a": a, "b": b}'))
    if feeds is not None and not isinstance(feeds, Mapping):
        raise OptionError(sentence("feeds as a dict", repr(feeds)[:60], 'pass {"x": x}'))
    fed = _fed_apart(feeds or {}, fetches)
    if session is not None and not hasattr(session, "graph"):
        raise OptionError(sentence("session as a tf.compat.v1.Session", repr(session)[:60], "leave it out"))
    if session is not None:
        names = Names(session.graph)
        with ThreadPoolExecutor(len(fetches)) as threads:
            return _gathered(
                {
                    name: threads.submit(session.run, _elements(one, names), _feeds(fed[name], names))
                    for name, one in fetches.items()
                }
            )
    with sessions({"all": graph}, init=init, threads=len(fetches)) as opened:
        one = opened["all"]
        return _gathered({name: one.run_async(wanted, fed[name]) for name, wanted in fetches.items()})


def _elements(nest: Any, names: Names) -> Any:
    """What is fetched, in the form that it was asked for."""
    if isinstance(nest, Mapping):
        return {key: _elements(one, names) for key, one in nest.items()}
    if isinstance(nest, tuple | list):
        made = [_elements(one, names) for one in nest]
        return type(nest)(*made) if hasattr(nest, "_fields") else type(nest)(made)
    if isinstance(nest, tf.SparseTensor | tf.RaggedTensor):
        return nest
    return names.element(nest, "fetches")


def _feeds(given: Mapping[Any, Any], names: Names) -> dict[Any, Any]:
    return {names.tensor(one, "feed_dict"): value for one, value in given.items()}


def _gathered(asked: Mapping[str, Future[Any]]) -> dict[str, Any]:
    """All of them, or the first error, with the name of who raised it."""
    found = {}
    for name, future in asked.items():
        try:
            found[name] = future.result()
        except Exception as error:
            error.add_note(f"raised by {name!r} of carpool.tensorflow.run")
            raise
    return found


def _fed_apart(feeds: Mapping[Any, Any], fetches: Mapping[str, Any]) -> dict[str, Mapping[Any, Any]]:
    is_apart = bool(feeds) and all(
        isinstance(name, str) and name in fetches and isinstance(one, Mapping) for name, one in feeds.items()
    )
    return {name: feeds.get(name, {}) if is_apart else feeds for name in fetches}


def _graph(given: Any) -> tuple[tf.Graph, Mapping[str, Any]]:
    made = given if isinstance(given, Graph) else Graph(given, fetches="none")
    return made.build()


def _check(graphs: Mapping[str, Any], memory: Mapping[str, Size]) -> None:
    if not isinstance(graphs, Mapping) or not graphs:
        raise ModelError(sentence("graphs by name", repr(graphs)[:60], 'pass {"a": graph_a, "b": graph_b}'))
    Arguments(ModelError).mapping("graphs", graphs, 'pass {"a": graph_a, "b": graph_b}')
    for name, cap in Arguments().mapping("memory", memory, 'pass memory={"a": "2GiB"}').items():
        if name not in graphs:
            raise OptionError(
                sentence(f"memory for one of {', '.join(graphs)}", repr(name), "name one of these")
            )
        limit(cap, f"memory[{name!r}]")
