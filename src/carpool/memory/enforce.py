"""A memory policy set for this process, and the loud error where a framework has begun without it.

Frameworks are found in `sys.modules`; nothing is imported to ask.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from carpool.arguments import Arguments
from carpool.errors import TooLateError, sentence
from carpool.memory import device
from carpool.memory.policy import Policy, variables
from carpool.memory.size import Size, limit, shown

_FIRST = "call carpool.limit_memory at the top of the program, before"


def limit_memory(memory: Size = "auto", *, growth: bool = True) -> None:
    """Sets how this process takes GPU memory, for torch, JAX and TensorFlow; call it before they are imported.

    `memory` is the most it may take: "auto" sets no limit, "8GiB" so much, "25%" a share of the device. With `growth` memory is taken
    when it is needed. Raises `TooLateError` where a framework has begun and could no longer follow.

    >>> import os, carpool
    >>> before = dict(os.environ)
    >>> carpool.limit_memory("25%")
    >>> os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]
    '0.250000'
    >>> os.environ.clear(); os.environ.update(before)
    """
    enforce(Policy(limit(memory), Arguments().flag("growth", growth)))


def enforce(policy: Policy) -> None:
    """Sets the policy for this process: variables for what is not imported yet, calls for what is."""
    gpus, visible = len(device.gpus()), os.environ.get("CUDA_VISIBLE_DEVICES")
    total = device.read("cuda").total_bytes if visible_gpus(visible, gpus) else None
    if late := too_late(begun(), policy, total, visible, gpus):
        raise TooLateError(late)
    os.environ.update(variables(policy, total, os.environ))
    if (torch := _torch()) is not None:
        torch.limit_memory(policy)
    if (tensorflow := sys.modules.get("tensorflow")) is not None and total is not None:
        _limit_tensorflow(tensorflow, policy, total)


@dataclass(frozen=True)
class Begun:
    """What the frameworks of this process have begun on a GPU."""

    jax: tuple[str, ...] = ()
    """Its platforms other than the CPU, once they are initialised."""
    tensorflow: bool = False
    tensorflow_gpus: int | None = None
    """How many GPUs TensorFlow found, once it has looked for them; None where it was built without CUDA."""
    torch_bytes: int = 0
    """What torch's allocator has reserved on the current device."""
    torch_gpus: int | None = None
    """How many GPUs torch sees, once CUDA is initialised."""
    is_visible_changed: bool = False
    """Whether CUDA_VISIBLE_DEVICES is another than when the process began."""


def begun() -> Begun:
    """This process, now."""
    torch = _torch()
    return Begun(
        jax=_jax_platforms(sys.modules),
        tensorflow=_tensorflow_begun(sys.modules),
        tensorflow_gpus=_tensorflow_gpus(sys.modules),
        torch_bytes=torch.reserved_bytes() if torch else 0,
        torch_gpus=torch.initialised_gpus() if torch else None,
        is_visible_changed=_is_visible_changed(),
    )


def too_late(
    begun: Begun, policy: Policy, total_bytes: int | None, visible: str | None, gpus: int
) -> str | None:
    """Why this policy can no longer be followed; None when it can. `visible` is CUDA_VISIBLE_DEVICES, of so many GPUs."""
    if begun.jax:
        started = f"JAX has started {', '.join(begun.jax)}, with the settings of that moment"
        return sentence("JAX's devices not to be initialised", started, f"{_FIRST} the first use of jax")
    if begun.tensorflow:
        started = "TensorFlow has initialised its GPUs, with the settings of that moment"
        return sentence("TensorFlow's devices not to be initialised", started, f"{_FIRST} import tensorflow")
    if changed := visible_changed_late(begun, visible, gpus):
        return changed
    most = policy.limit_bytes(total_bytes) if total_bytes else None
    if most is not None and begun.torch_bytes > most:
        return sentence(
            f"torch to hold at most the limit of {shown(most)} when it is set",
            f"{shown(begun.torch_bytes)} reserved by its CUDA allocator",
            f"{_FIRST} the first tensor on the GPU, or delete tensors and call torch.cuda.empty_cache() first",
        )
    return None


def visible_changed_late(begun: Begun, visible: str | None, gpus: int) -> str | None:
    """What is wrong where the process changed CUDA_VISIBLE_DEVICES and torch or TensorFlow had its GPUs before that.

    A variable that nobody changed is never wrong: where a GPU is partitioned, CUDA counts in its own way.
    """
    shows = visible_gpus(visible, gpus)
    if not begun.is_visible_changed:
        return None
    for name, had in (("torch", begun.torch_gpus), ("tensorflow", begun.tensorflow_gpus)):
        if had not in (None, shows):
            return sentence(
                f"CUDA_VISIBLE_DEVICES to stay as it was when {name} initialised CUDA",
                f"{visible!r}, which shows {shows} of the machine's GPUs, while {name} has initialised {had}",
                f"set os.environ['CUDA_VISIBLE_DEVICES'] before import {name}, or in the shell",
            )
    return None


def visible_gpus(visible: str | None, gpus: int) -> int:
    """How many of the machine's GPUs CUDA_VISIBLE_DEVICES shows; an entry that names none hides all after it.

    >>> visible_gpus(None, 4), visible_gpus("1,0", 4), visible_gpus("2,9,1", 4), visible_gpus("GPU-3f", 0)
    (4, 2, 1, 0)
    """
    if visible is None or not gpus:
        return gpus
    shown_gpus = 0
    for part in (part.strip() for part in visible.split(",")):
        if not (part.startswith(("GPU-", "MIG-")) or (part.isdigit() and int(part) < gpus)):
            break
        shown_gpus += 1
    return shown_gpus


def _torch() -> Any:
    """Our own side of torch, where the user has imported it (or is about to have: half an import has no `cuda`)."""
    if not hasattr(sys.modules.get("torch"), "cuda"):
        return None
    return importlib.import_module("carpool.adapters.torch.memory")


def _is_visible_changed() -> bool:
    """False where the system does not tell what the process began with."""
    name = "CUDA_VISIBLE_DEVICES"
    try:
        first = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    began = next((text.partition(b"=")[2] for text in first if text.startswith(name.encode() + b"=")), None)
    now = os.environ.get(name)
    return began != (None if now is None else os.fsencode(now))


def _jax_platforms(modules: Mapping[str, ModuleType]) -> tuple[str, ...]:
    bridge = modules.get("jax._src.xla_bridge")
    return tuple(sorted(name for name in getattr(bridge, "_backends", {}) if name != "cpu"))


def _tensorflow_begun(modules: Mapping[str, ModuleType]) -> bool:
    context = getattr(modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(context, "_context_handle", None) is None:
        return False
    return bool(modules["tensorflow"].config.list_physical_devices("GPU"))


def _tensorflow_gpus(modules: Mapping[str, ModuleType]) -> int | None:
    """Nothing is initialised to ask."""
    context = getattr(modules.get("tensorflow.python.eager.context"), "_context", None)
    found = getattr(context, "_physical_devices", None)
    if found is None or not modules["tensorflow"].test.is_built_with_cuda():
        return None
    return sum(device.device_type == "GPU" for device in found)


def _limit_tensorflow(tensorflow: Any, policy: Policy, total_bytes: int) -> None:
    """TensorFlow takes either a limit or growth for a device; the variable for growth covers both."""
    most = policy.limit_bytes(total_bytes)
    for gpu in tensorflow.config.list_physical_devices("GPU"):
        if most is not None:
            made = tensorflow.config.LogicalDeviceConfiguration(memory_limit=max(1, most >> 20))
            tensorflow.config.set_logical_device_configuration(gpu, [made])
        else:
            tensorflow.config.set_memory_growth(gpu, policy.growth)
