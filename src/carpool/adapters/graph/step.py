"""One run of a graph, prepared once and called with arrays: what `Session.run` does, without what it does anew at each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from carpool.adapters.graph.feeding import Fed


class Step:
    """Fetches and operations of a session's graph, to be run with these tensors fed."""

    def __init__(
        self,
        session: Any,
        fed: Sequence[str],
        fetches: Mapping[str, Any],
        also: Sequence[Any] = (),
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`inside` is what each run happens in."""
        self._inside = inside
        tensors = {word: one.name for word, one in fetches.items() if not isinstance(one, tf.Operation)}
        operations = [one for one in (*fetches.values(), *also) if isinstance(one, tf.Operation)]
        beside = [one.name for one in also if not isinstance(one, tf.Operation)]
        self._fed = tuple(fed)
        self._given = {word: name for word, name in tensors.items() if name in fed}
        """Fetched and fed: TensorFlow gives back what was fed, and its callables refuse to."""
        self._words = [word for word in tensors if word not in self._given]
        wanted = dict.fromkeys([*(tensors[word] for word in self._words), *beside])
        self._places = [list(wanted).index(tensors[word]) for word in self._words]
        options = config_pb2.CallableOptions()
        options.feed.extend(self._fed)
        options.fetch.extend(wanted)
        options.target.extend(dict.fromkeys(one.name for one in operations))
        self._call = session._make_callable_from_options(options)

    def __call__(self, fed: Fed) -> dict[str, Any]:
        """What was fetched, by name."""
        given = [fed[name] for name in self._fed]
        with self._inside():
            made = self._call(*given)
        found = {word: made[place] for word, place in zip(self._words, self._places, strict=True)}
        return {**found, **{word: fed[name] for word, name in self._given.items()}} if self._given else found
