"""Graphs that were written before: frozen GraphDefs and SavedModels, read to be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from carpool.arguments import Arguments
from carpool.errors import FileError, ModelError, sentence, shown

_v1 = tf.compat.v1
_MAIN_OPS = ("saved_model_main_op", "legacy_init_op")
_INIT_SIGNATURE = "__saved_model_init_op"


@dataclass(frozen=True)
class Restoring:
    """Gives a session of a SavedModel's graph its variables and tables: an `init`."""

    variables: str
    saver: bytes
    main: str | None
    assets: Mapping[str, str]

    def __call__(self, session: Any) -> None:
        definition = _v1.train.SaverDef()
        definition.ParseFromString(self.saver)
        if definition.restore_op_name:
            with session.graph.as_default():
                _v1.train.Saver(saver_def=definition).restore(session, self.variables)
        if self.main is not None:
            session.run(session.graph.as_graph_element(self.main), feed_dict=dict(self.assets))


@dataclass(frozen=True)
class Loaded:
    """A SavedModel's graph, its signature by name, and what initialises it."""

    graph: tf.Graph
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    restoring: Restoring


def frozen(source: Any) -> tf.Graph:
    """A GraphDef, its bytes, or the file that holds it, as a graph."""
    if isinstance(source, str | Path):
        if not Path(source).is_file():
            raise FileError(sentence("a file with a GraphDef", f"{source}, which is none", "check the path"))
        source = Path(source).read_bytes()
    if not isinstance(source, bytes | _v1.GraphDef):
        expected = "a GraphDef, its bytes, or the path of a file that holds it"
        raise FileError(sentence(expected, shown(source), 'pass "frozen.pb"'))
    if isinstance(source, bytes):
        definition = _v1.GraphDef()
        definition.ParseFromString(source)
        source = definition
    made = tf.Graph()
    with made.as_default():
        tf.import_graph_def(source, name="")
    return made


def saved_model(path: str | Path, signature: str, tags: Sequence[str]) -> Loaded:
    says = Arguments(FileError)
    path = says.path("a SavedModel", path, 'pass the folder with "saved_model.pb"')
    words = [
        says.text("tags that are text", tag, 'pass ("serve",)')
        for tag in says.listed("tags", tags, 'pass ("serve",)')
    ]
    if not (path / "saved_model.pb").is_file():
        raise FileError(sentence("a folder with saved_model.pb", str(path), "check the path"))
    graph = tf.Graph()
    with _v1.Session(graph=graph) as session:
        meta = _v1.saved_model.load(session, words, str(path))
    known = {word: one for word, one in meta.signature_def.items() if word != _INIT_SIGNATURE}
    if signature not in known:
        raise ModelError(
            sentence("a signature of the SavedModel", repr(signature), f"use {', '.join(known)}")
        )
    return Loaded(
        graph,
        {word: one.name for word, one in known[signature].inputs.items()},
        {word: one.name for word, one in known[signature].outputs.items()},
        Restoring(
            str(Path(path) / "variables" / "variables"),
            meta.saver_def.SerializeToString(),
            _main(meta),
            {one.tensor_info.name: str(Path(path) / "assets" / one.filename) for one in _assets(meta)},
        ),
    )


def _assets(meta: Any) -> list[Any]:
    """Files that the graph reads: TensorFlow 1 wrote them among the collections."""
    if meta.asset_file_def or "saved_model_assets" not in meta.collection_def:
        return list(meta.asset_file_def)
    found = []
    for packed in meta.collection_def["saved_model_assets"].any_list.value:
        found.append(meta_graph_pb2.AssetFileDef())
        packed.Unpack(found[-1])
    return found


def _main(meta: Any) -> str | None:
    """The operation that a SavedModel wants to be run once: for its tables, say."""
    if _INIT_SIGNATURE in meta.signature_def:
        return meta.signature_def[_INIT_SIGNATURE].outputs[_INIT_SIGNATURE].name
    found = [meta.collection_def[key] for key in _MAIN_OPS if key in meta.collection_def]
    names = [name for one in found for name in one.node_list.value]
    return names[0] if names else None
