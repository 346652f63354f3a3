"""How a session takes threads and GPU memory, as TensorFlow's ConfigProto."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from carpool.adapters.graph.denormals import Flushed, can_flush
from carpool.errors import OptionError, sentence
from carpool.errors import shown as shown_value
from carpool.memory import device
from carpool.memory.size import Size, limit, shown

_IN_THE_CALLER = -1  # TensorFlow's word for: no threads of its own


def config(base: Any = None, in_caller: bool = False, fraction: float | None = None) -> Any:
    """A copy of `base` with what it leaves open.

    A step that waits for nobody is run by the thread that asks for it, without a hop to TensorFlow's: then as many steps run at once as there are
    sessions stepped, on the one pool for large operations that all sessions of a process share. Other steps share one pool too.
    """
    made = tf.compat.v1.ConfigProto()
    if base is not None:
        check(base)
        made.CopyFrom(base)
    if (
        in_caller
        and can_flush()
        and not made.inter_op_parallelism_threads
        and not made.session_inter_op_thread_pool
    ):
        made.inter_op_parallelism_threads = _IN_THE_CALLER
    if base is None or not base.HasField("gpu_options"):
        made.gpu_options.allow_growth = True
    if fraction is not None:
        made.gpu_options.per_process_gpu_memory_fraction = fraction
    return made


def check(base: Any) -> None:
    """Whether it is what a session is told things by."""
    if not isinstance(base, tf.compat.v1.ConfigProto):
        remedy = "pass one, or leave config out"
        raise OptionError(sentence("config as a tf.compat.v1.ConfigProto", shown_value(base), remedy))


def inside_of(made: Any) -> Callable[[], AbstractContextManager[Any]]:
    """What runs of a session with this config happen in."""
    return Flushed if made.inter_op_parallelism_threads == _IN_THE_CALLER and can_flush() else nullcontext


def fraction_of(caps: Sequence[Size | None]) -> float | None:
    """What sessions with these caps may take of the first GPU together; None without a GPU, or where one of them has no cap.

    TensorFlow has one pool for each GPU of a process, made by the first session as that one says: every session says the sum.
    """
    gpus = device.gpus()
    if not caps or any(cap is None for cap in caps) or not gpus:
        return None
    total = device.read("cuda").total_bytes
    limits = [limit(cap, "memory") for cap in caps if cap is not None]
    shares = [one.share if one.share is not None else (one.size_bytes or 0) / total for one in limits]
    return min(1.0, sum(shares))


def told(caps: Mapping[str, Size | None]) -> str:
    """The caps in words, for a plan or a report."""
    parts = []
    for name, cap in caps.items():
        one = limit(cap, "memory") if cap is not None else None
        size = "as needed" if one is None else shown(one.size_bytes) if one.size_bytes else f"{one.share:.0%}"
        parts.append(f"{name}: {size}")
    return ", ".join(parts)
