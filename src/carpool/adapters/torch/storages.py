"""The memory of tensors on the host, for messages to workers: it goes beside the pickle, and two views of one storage stay that."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.storage import TypedStorage

from carpool.process.wire import LARGE_BYTES, Large


def large(thing: Any) -> Large | None:
    """A storage of 64 KiB or more; a tensor is pickled as its storage and how it looks at it."""
    if type(thing) is not TypedStorage:
        return None
    storage = thing._untyped_storage
    if storage.device.type != "cpu" or storage.nbytes() < LARGE_BYTES:
        return None
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    key = ("storage", storage.data_ptr(), storage.nbytes())
    return Large(key, storage, data, _storage, (thing.dtype,))


def _storage(view: memoryview, dtype: torch.dtype) -> TypedStorage:
    storage = torch.from_numpy(np.frombuffer(view, np.uint8)).untyped_storage()
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
