"""What a traced function does, read off its graph: which variables it writes, and what it draws or calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
_GLOBAL_RANDOM = frozenset(
    {
        "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal",
        "RandomShuffle", "Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2",
    }
)  # fmt: skip
_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2d")


def written(function: Any) -> frozenset[int]:
    """The ids of the captured handles that the function may write; who hands one to a function of its own may write it there."""
    found: set[int] = set()
    for outside, inside in function.graph.captures:
        if inside.dtype == tf.resource and any(op.type not in _READS for op in inside.consumers()):
            found.add(id(outside))
    return frozenset(found)


def draws_globally(function: Any) -> str | None:
    """The first operation that draws from TensorFlow's global generator, whose numbers are no job's own."""
    return next((op for op in operations(function) if op in _GLOBAL_RANDOM), None)


def draws(function: Any) -> bool:
    return any("Random" in op or op == "RngReadAndSkip" for op in operations(function))


def convolves(function: Any) -> bool:
    return any(op.startswith(_CONVOLUTIONS) for op in operations(function))


def floating(function: Any) -> frozenset[str]:
    """The names of the floating types in which it computes."""
    kinds = {node.attr["T"].type for node in _nodes(function) if "T" in node.attr}
    found = [tf.as_dtype(kind) for kind in kinds if kind]
    return frozenset(kind.name for kind in found if kind.is_floating or kind.is_complex)


def operations(function: Any) -> Iterator[str]:
    """The kinds of all operations, those of functions inside too."""
    return (node.op for node in _nodes(function))


def _nodes(function: Any) -> Iterator[Any]:
    graph = function.graph.as_graph_def()
    for part in (graph.node, *(inner.node_def for inner in graph.library.function)):
        yield from part


def output_bytes(function: Any) -> int:
    """What its operations make on the way, half of it at a time: a guess on the safe side. Unknown sizes count as one."""
    made = 0
    for operation in function.graph.get_operations():
        for output in operation.outputs:
            if output.dtype.is_numpy_compatible and output.shape.rank is not None:
                size = 1
                for dim in output.shape.as_list():
                    size *= dim or 1
                made += size * output.dtype.size
    return made // 2
