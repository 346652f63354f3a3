"""The values of a graph's variables: given by initialisers, read and written by name. Nothing is added to the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from carpool.errors import FileError, ModelError, sentence

_v1 = tf.compat.v1


def variables_of(graph: tf.Graph) -> dict[str, Any]:
    """Global and local variables by name."""
    keys = (_v1.GraphKeys.GLOBAL_VARIABLES, _v1.GraphKeys.LOCAL_VARIABLES)
    return {one.op.name: one for key in keys for one in graph.get_collection(key)}


def initialisers(graph: tf.Graph) -> list[Any]:
    """What gives every variable and table its first value: what the functions of TensorFlow that make one operation of them group."""
    made = [one.initializer for one in variables_of(graph).values()]
    return [*made, *graph.get_collection(_v1.GraphKeys.TABLE_INITIALIZERS)]


def initialise(session: Any, init: Any, feeds: Mapping[Any, Any], element: Callable[[Any, str], Any]) -> None:
    """Runs the initialiser: all of the graph's own where `init` is None, operations or names, or a function of the session."""
    if callable(init) and not hasattr(init, "graph"):
        init(session)
        return
    if init is None:
        wanted = initialisers(session.graph)
    else:
        listed = list(init) if isinstance(init, Sequence) and not isinstance(init, str) else [init]
        wanted = [element(one, "init") for one in listed]
    if wanted:
        session.run(wanted, feed_dict=dict(feeds))


def check_initialised(session: Any, used: set[str]) -> None:
    """Raises ModelError where a variable that the job uses has no value."""
    known = {name: one for name, one in variables_of(session.graph).items() if name in used}
    missing = [name for name, one in known.items() if not _has_value(session, one)]
    if missing:
        raise ModelError(
            sentence(
                "init to give every variable that the job uses a value",
                f"none for {', '.join(missing[:5])}",
                "leave init out, which initialises all of them, or pass tf.compat.v1.global_variables_initializer()",
            )
        )


def read(session: Any) -> dict[str, np.ndarray]:
    """Every variable's value; those without one are left out."""
    found = variables_of(session.graph)
    try:
        return _arrays(session.run(found))
    except tf.errors.FailedPreconditionError:
        return _arrays(session.run({name: one for name, one in found.items() if _has_value(session, one)}))


def write(session: Any, values: Mapping[str, np.ndarray]) -> None:
    """Gives variables these values, by what their initialisers are fed."""
    found = variables_of(session.graph)
    unknown = sorted(set(values) - set(found))
    if unknown:
        raise ModelError(
            sentence(
                "values of this graph's variables", f"{unknown[0]!r}", "load what this graph was saved as"
            )
        )
    wanted = [found[name].initializer for name in values]
    if wanted:
        fed = [one.inputs[1] for one in wanted]
        session.run(wanted, feed_dict=dict(zip(fed, values.values(), strict=True)))


def _has_value(session: Any, variable: Any) -> bool:
    try:
        session.run(variable)
    except tf.errors.FailedPreconditionError:
        return False
    return True


def _arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in values.items()}


def checkpointed(path: str | Path, graph: tf.Graph) -> dict[str, np.ndarray]:
    """Values in a checkpoint, or in the newest of a folder, of the variables of this graph."""
    prefix = tf.train.latest_checkpoint(str(path)) if Path(path).is_dir() else str(path)
    if prefix is None or not _v1.train.checkpoint_exists(prefix):
        raise FileError(sentence("a checkpoint to restore", f"{path}, which holds none", "check the path"))
    reader = tf.train.load_checkpoint(prefix)
    return {name: reader.get_tensor(name) for name in variables_of(graph) if reader.has_tensor(name)}
