"""TensorFlow's memory on a GPU: growth, a share, or a limit of its own for each process, set before its devices start.

TensorFlow has a variable for growth and none for a limit, so a worker that may take so much is told by one of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from carpool.errors import TooLateError, sentence
from carpool.job import Job
from carpool.memory import device as devices
from carpool.memory.enforce import begun, visible_changed_late
from carpool.memory.policy import allocator_bytes
from carpool.memory.size import shown, size

LIMIT = "CARPOOL_TENSORFLOW_LIMIT"
"""The bytes that TensorFlow may take on each GPU of the process that finds this in its environment."""
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


@dataclass(frozen=True)
class Cap:
    """How TensorFlow takes the memory of one GPU: at most so much, or as it needs it."""

    device: str
    limit_bytes: int | None
    growth: bool

    def __str__(self) -> str:
        """
        >>> print(Cap("GPU:0", 2 << 30, False)); print(Cap("GPU:1", None, True))
        GPU:0 at most 2.0 GiB
        GPU:1 as it is needed
        """
        if self.limit_bytes is not None:
            return f"{self.device} at most {shown(self.limit_bytes)}"
        return f"{self.device} {'as it is needed' if self.growth else 'all of it at once'}"


def begin() -> None:
    """Before the first use of a device: what the process was told, or else growth, so that those beside it find memory too."""
    if late := visible_changed_late(begun(), os.environ.get("CUDA_VISIBLE_DEVICES"), len(devices.gpus())):
        raise TooLateError(late)
    told = os.environ.get(LIMIT)
    if is_started():
        if told is not None:
            _check_kept(int(told))
    elif told is not None:
        limit(int(told))
    elif _GROWTH not in os.environ:
        os.environ[_GROWTH] = "true"


def is_started() -> bool:
    """Whether TensorFlow has initialised its devices; nothing is initialised to ask."""
    from tensorflow.python.eager import context

    return getattr(context._context, "_context_handle", None) is not None


def limit(limit_bytes: int) -> None:
    """Gives each GPU one logical device of so many bytes. Raises TooLateError where TensorFlow has started."""
    if is_started():
        raise TooLateError(
            sentence(
                "TensorFlow's devices not to be initialised",
                "TensorFlow has initialised them, with the settings of that moment",
                "set the limit before the first tensor: carpool.limit_memory at the top of the program",
            )
        )
    made = tf.config.LogicalDeviceConfiguration(memory_limit=max(1, limit_bytes >> 20))
    for gpu in gpus():
        tf.config.set_logical_device_configuration(gpu, [made])


def gpus() -> list[Any]:
    return tf.config.list_physical_devices("GPU")


def caps() -> tuple[Cap, ...]:
    """How TensorFlow takes the memory of this process' GPUs, as it is set now; none without a GPU."""
    grows = os.environ.get(_GROWTH, "").lower() == "true"
    return tuple(_cap(number, gpu, grows) for number, gpu in enumerate(gpus()))


def _cap(number: int, gpu: Any, grows: bool) -> Cap:
    made = tf.config.get_logical_device_configuration(gpu)
    limits = [one.memory_limit for one in made or () if one.memory_limit is not None]
    if limits:
        return Cap(f"GPU:{number}", int(sum(limits)) << 20, growth=False)
    return Cap(f"GPU:{number}", None, grows or bool(tf.config.experimental.get_memory_growth(gpu)))


def _check_kept(limit_bytes: int) -> None:
    """Raises where TensorFlow started, on a GPU, without the limit that the process was given."""
    free = next((cap for cap in caps() if cap.limit_bytes is None or cap.limit_bytes > limit_bytes), None)
    if free is not None:
        raise TooLateError(
            sentence(
                f"TensorFlow to start with at most {shown(limit_bytes)}",
                f"{free}: a device was used before carpool could set it",
                "use no tensor when the modules that the job names are imported: make them in its functions",
            )
        )


def worker_environment(jobs: Sequence[Job]) -> Mapping[str, str]:
    """Variables of a process for these jobs: its limit, where each of them has a budget, without what a CUDA context takes."""
    budgets = [size(job.budget) for job in jobs if job.budget is not None]
    if not budgets or len(budgets) < len(jobs):
        return {}
    return {LIMIT: str(allocator_bytes(sum(budgets)))}


def told(job: Job) -> str:
    """What the plan says of the memory that the job may take."""
    listed = [str(cap) for cap in caps()]
    if job.budget is not None:
        most = allocator_bytes(size(job.budget))
        listed.append(
            f"in a process of its own at most {shown(size(job.budget))} ({shown(most)} of a GPU by TensorFlow)"
        )
    return f"TensorFlow's memory: {', '.join(listed)}" if listed else ""
