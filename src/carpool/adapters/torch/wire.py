"""Torch's objects in messages to workers: the memory of tensors goes beside the pickle, and optimizers stay tracked by schedulers."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.storage import TypedStorage

from carpool.process.wire import LARGE_BYTES, Large


def special(thing: Any) -> Large | tuple[Any, ...] | None:
    """What is not pickled as torch would."""
    if type(thing) is TypedStorage:
        return _large(thing)
    if isinstance(thing, Optimizer) and hasattr(thing.step, "_wrapped_by_lr_sched"):
        return object.__new__, (type(thing),), thing.__getstate__(), None, None, _restore_tracked
    return None


def _large(thing: TypedStorage) -> Large | None:
    """A storage of 64 KiB or more. A tensor is pickled as its storage and how it looks at it, so two views of one stay that."""
    storage = thing._untyped_storage
    if storage.device.type != "cpu" or storage.nbytes() < LARGE_BYTES:
        return None
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    key = ("storage", storage.data_ptr(), storage.nbytes())
    return Large(key, storage, data, _storage, (thing.dtype,))


def _storage(view: memoryview, dtype: torch.dtype) -> TypedStorage:
    storage = torch.from_numpy(np.frombuffer(view, np.uint8)).untyped_storage()
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _restore_tracked(optimizer: Any, state: dict[str, Any]) -> None:
    """Gives an optimizer its state, and the step that a scheduler had put into it: pickling leaves that out, and torch then warns."""
    optimizer.__setstate__(state)
    step, reference = type(optimizer).step, weakref.ref(optimizer)

    @wraps(step)
    def tracked(*arguments: Any, **keywords: Any) -> Any:
        own: Any = reference()
        own._opt_called = True
        return step(own, *arguments, **keywords)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = tracked
