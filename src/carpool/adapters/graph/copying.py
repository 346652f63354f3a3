"""A graph again, as one of its own: for a job beside another one on the same graph, for a saver of ours, for a worker."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from carpool.errors import ModelError, sentence

_v1 = tf.compat.v1


def exported(graph: tf.Graph) -> bytes:
    """A graph with its collections as a MetaGraphDef; refused where a part of it lives in this process only."""
    if why := refusal(graph):
        raise ModelError(
            sentence("a graph that can be copied", why, "pass a function that builds the graph instead")
        )
    with graph.as_default():  # outside of a graph TensorFlow refuses
        return _v1.train.export_meta_graph(graph=graph).SerializeToString()


def imported(meta: bytes) -> tf.Graph:
    made = tf.Graph()
    with made.as_default():
        proto = _v1.MetaGraphDef()
        proto.ParseFromString(meta)
        _v1.train.import_meta_graph(proto)
    return made


def copied(graph: tf.Graph) -> tf.Graph:
    return imported(exported(graph))


def refusal(graph: tf.Graph) -> str | None:
    """Why a copy would not be the same; None where it would."""
    for operation in graph.get_operations():
        if "PyFunc" in operation.type:
            return f"{operation.name!r}, a Python function in the graph, which both would call"
    return None


def saver_of(definition: Any) -> Any:
    """A saver again from what it is made of; its operations are in the graph of the session that it is used with."""
    return _v1.train.Saver(saver_def=definition)
