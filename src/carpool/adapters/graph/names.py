"""From what users name, by word or by object, to elements of one graph; what belongs elsewhere is refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from carpool.errors import ModelError, sentence

Element = Any
"""A tensor or an operation of a graph."""


class Names:
    """The names of one graph. `known` are words that stand for its elements; `original` is the graph that it was copied from."""

    def __init__(
        self, graph: tf.Graph, known: Mapping[str, Any] | None = None, original: tf.Graph | None = None
    ) -> None:
        self.graph, self._known, self._original = graph, dict(known or {}), original

    def fetches(self, given: Any) -> dict[str, Element]:
        """What is fetched, by the names that results have."""
        if isinstance(given, Mapping):
            return {str(word): self.element(one, f"fetches[{word!r}]") for word, one in given.items()}
        listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        found = [(one, self.element(one, "fetches")) for one in listed]
        return {_word(one, element): element for one, element in found}

    def tensor(self, thing: Any, word: str) -> Element:
        """A tensor that can be fed."""
        element = self.element(thing, word)
        if isinstance(element, tf.Operation):
            raise ModelError(
                sentence(
                    f"{word} to be a tensor", f"operation {element.name!r}, which has none", "name a tensor"
                )
            )
        return element

    def element(self, thing: Any, word: str) -> Element:
        """The tensor or operation that is meant; a word for an operation with one output means that output."""
        if isinstance(thing, str):
            return self._named(thing, word)
        if isinstance(thing, tf.SparseTensor | tf.RaggedTensor):
            raise ModelError(
                sentence(
                    f"{word} to be a tensor", f"a {type(thing).__name__}", "name its parts, such as .values"
                )
            )
        owner = self._owner(thing, word)
        if owner is not self.graph:
            if self._original is not None and owner is self._original:
                return self.graph.as_graph_element(name_of(thing))
            raise ModelError(
                sentence(
                    f"{word} to be of the job's own graph",
                    f"{name_of(thing)!r}, which is in another one",
                    "build it inside `with graph.as_default():`, or pass its name",
                )
            )
        return self.graph.as_graph_element(thing)

    def _owner(self, thing: Any, word: str) -> Any:
        try:
            return thing.graph
        except AttributeError:
            is_eager = isinstance(thing, tf.Tensor | tf.Variable)
            received = "an eager tensor, which has its value already" if is_eager else type(thing).__name__
            remedy = "build it inside `with graph.as_default():`" if is_eager else "pass tensors or names"
            raise ModelError(sentence(f"{word} to be an element of a graph", received, remedy)) from None

    def _named(self, name: str, word: str) -> Element:
        if name in self._known:
            return self.element(self._known[name], word)
        try:
            found: Any = self.graph.as_graph_element(name)
        except (KeyError, ValueError):
            near = difflib.get_close_matches(name, self._all(), n=3, cutoff=0.4)
            remedy = f"did you mean {', '.join(near)}" if near else "see graph.get_operations()"
            raise ModelError(
                sentence(f"{word} to name an element of the graph", repr(name), remedy)
            ) from None
        is_one = isinstance(found, tf.Operation) and len(found.outputs) == 1
        return found.outputs[0] if is_one else found

    def _all(self) -> list[str]:
        return [*self._known, *(operation.name for operation in self.graph.get_operations())]


def operation_of(element: Element) -> tf.Operation:
    return element if isinstance(element, tf.Operation) else element.op


def name_of(thing: Any) -> str:
    """Of a variable, the name of the tensor that holds its value."""
    return str(thing.graph.as_graph_element(thing).name)


def _word(given: Any, element: Element) -> str:
    return given if isinstance(given, str) else operation_of(element).name
